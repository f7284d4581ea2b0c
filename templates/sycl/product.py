"""Products of rows with a packed weight in SYCL, with their epilogues: linear and convolution."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from ipex_inductor.aot_cache.key import pairs
from ipex_inductor.ops.stem import sides
from ipex_inductor.ops.sycl import COLUMNS, RUN, WORD, Window
from ipex_inductor.templates.sycl import dots, words
from ipex_inductor.templates.sycl.device import Device
from ipex_inductor.templates.sycl.kernel import constants, head, options, part, rolled, types
from ipex_inductor.templates.sycl.source import Entry, Source
from ipex_inductor.templates.sycl.tiles import CPU, LARGE, Tile, itemsize

_POINTERS = ("*",) * 8
_SIZES = ("i32",) * 5 + ("i64",) * 2 + ("fp32",) * 2
ENGINE, DOTS, LANES = ("engine.cpp", "matrix.cpp"), ("dots.cpp",), ("lanes.cpp",)  # make sums
GEOMETRY = {"rows": ("i64",), "window": ("i32",) * 12}  # how rows are gathered


@dataclass(frozen=True)
class Epilogue:
    """What is done to sums, after a bias: `unary(binary(sum, other))`, of `ops/epilogue.py`.

    `gated`: `unary(sum) * second`, of a second product of the same rows.
    """

    binary: str = "none"
    unary: str = "none"
    gated: bool = False


def source(tile: Tile, arch: str, gather: str, given: str, made: str, epilogue: Epilogue) -> Source:
    """The kernel `product`: rows x [M, K] of `given`, gathered as `gather`, to `made` [M, N].

    int8 is summed in int32, and scaled a column; all else in fp32. Rounded once, at the end.
    """
    dtypes = {"In": given, "Out": made, "Sum": "int" if given == "int8" else "float"}
    sizes = asdict(tile) | {
        "LINE": tile.STEP,
        "PACKED": WORD // itemsize(given),
        "FILLED": RUN // itemsize(given),
        "PANEL": COLUMNS,
        "GATED": epilogue.gated,
        "CPU_LANES": arch == CPU and not tile.matrix,
    }
    matrix, large, by_pairs = (sizes.pop(name) for name in ("matrix", "large", "dots"))
    body = part("product.cpp")
    text = (
        head()
        + types(dtypes)
        + constants(sizes)
        + words.functions(epilogue.binary, epilogue.unary)
        + (dots.add_up(tile) if by_pairs else "")
        + "".join(map(part, ENGINE if matrix else DOTS if by_pairs else LANES))
        + part(f"{gather}.cpp")
        # The CPU's driver unrolls what it may: longer to compile, and in bf16 slower.
        + (rolled(body) if arch == CPU else body)
    )
    problem = {"template": f"product of {gather}", "dtypes": f"{given}, {made}"}
    return Source(
        text,
        (Entry("product", _POINTERS + _SIZES + GEOMETRY[gather], 2, tile.SG),),
        options(arch),
        (LARGE,) * large,
        ("fp16",) * ("fp16" in (given, made)) + ("matrix",) * matrix + ("dots",) * by_pairs,
        pairs(problem | asdict(tile) | asdict(epilogue)),
    )


def linear(
    device: Device,
    made: Source,
    tile: Tile,
    x: Tensor,
    weight: Tensor,
    columns: int,
    bias: Tensor | None = None,
    other: Tensor | None = None,
    scalars: tuple[float, float] = (0.0, 0.0),
    scale: Tensor | None = None,
    gated: tuple[Tensor, Tensor | None] | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`made` on rows: x [..., K], a weight of `packed`, bias, scale [columns], other as the result.

    `gated` is the weight and bias of the second product. The result [..., columns] is of `dtype`,
    or of x's.
    """
    rows = _rows(x)
    size = (*x.shape[:-1], columns)
    out = x.new_empty(size, dtype=dtype or x.dtype)
    beside = _rows(other.expand(size)) if other is not None else None
    sizes = (1, rows.shape[1])
    _launch(
        device, made, tile, rows, weight, _rows(out), bias, beside, scalars, scale, gated,
        sizes, (rows.stride(0),),
    )  # fmt: skip
    return out


def conv(
    device: Device,
    made: Source,
    tile: Tile,
    x: Tensor,
    weight: Tensor,
    columns: int,
    window: Window,
    bias: Tensor | None = None,
    other: Tensor | None = None,
    scalars: tuple[float, float] = (0.0, 0.0),
    scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`made` on windows: x [B, C, H, W], a weight of `packed_window`, other as the result.

    The result [B, columns, H', W'] is channels-last.
    """
    x = x.contiguous(memory_format=torch.channels_last)
    batch, channels, *image = x.shape
    height, width = sides(image, window.size, window.stride, window.padding, window.dilation)
    out = x.new_empty((batch, height, width, columns), dtype=dtype or x.dtype)
    beside = _rows(other.permute(0, 2, 3, 1)) if other is not None else None
    geometry = (
        *(*image, channels, height, width, window.across),
        *(*window.stride, *window.padding, *window.dilation),
    )
    _launch(
        device, made, tile, x, weight, out.flatten(0, 2), bias, beside, scalars, scale, None,
        (window.runs, window.terms(channels)), geometry,
    )  # fmt: skip
    return out.permute(0, 3, 1, 2)


def _launch(
    device: Device,
    made: Source,
    tile: Tile,
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    bias: Tensor | None,
    other: Tensor | None,
    scalars: tuple[float, float],
    scale: Tensor | None,
    gated: tuple[Tensor, Tensor | None] | None,
    terms: tuple[int, int],
    geometry: Sequence[int],
) -> None:
    if not out.numel():
        return
    rows, columns = out.shape
    second, second_bias = gated or (None, None)
    known = [t.contiguous() if t is not None else None for t in (bias, second_bias, scale)]
    pointers = (x, weight, second, *known, other, out)
    line = other.stride(0) if other is not None else 0
    sizes = (rows, columns, *terms, len(weight) * COLUMNS, line, out.stride(0), *scalars)
    given = [0 if each is None else each for each in (*pointers, *sizes, *geometry)]
    groups = -(-columns // tile.columns), -(-rows // tile.rows)
    device.load(made).kernel("product")(
        given, (groups[0], groups[1] * tile.threads), (1, tile.threads)
    )


def _rows(x: Tensor) -> Tensor:
    """[..., K] as [M, K] whose rows are each one piece."""
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()
