"""GEMMs of rows with a packed weight in SYCL, with their epilogues: linear and convolution."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ipex_inductor.aot_cache.key import pairs
from ipex_inductor.ops.conv.geometry import sides
from ipex_inductor.ops.conv.sycl import COLUMNS, RUN, WORD, Window
from ipex_inductor.templates.sycl import dots, words
from ipex_inductor.templates.sycl.device import Device
from ipex_inductor.templates.sycl.kernel import (
    constants,
    head,
    options,
    part,
    prevent_unrolling,
    types,
)
from ipex_inductor.templates.sycl.source import Entry, Source
from ipex_inductor.templates.sycl.tiles import CPU, LARGE, Tile, itemsize

_POINTERS = ("*",) * 8
_SIZES = ("i32",) * 5 + ("i64",) * 2 + ("fp32",) * 2
# The files that compute sums.
ENGINE, DOTS, LANES = ("engine.cpp", "matrix.cpp"), ("dots.cpp",), ("lanes.cpp",)
GEOMETRY = {"rows": ("i64",), "window": ("i32",) * 12}  # how rows are gathered


@dataclass(frozen=True)
class Epilogue:
    """Operations on the sums, after a bias: `unary(binary(sum, other))`.

    Their names are those of `ops/common/epilogue.py`.

    `gated`: `unary(sum) * second`, with a second GEMM of equal rows (GLU).
    """

    binary: str = "none"
    unary: str = "none"
    gated: bool = False


def source(tile: Tile, arch: str, gather: str, given: str, made: str, epilogue: Epilogue) -> Source:
    """Return the kernel `product`: a GEMM of rows [M, K] to [M, N], with its epilogue.

    int8 is summed in int32 and scaled a column, all else in fp32. Results are rounded once, at the
    end.

    Args:
        tile: the tile of the GEMM.
        arch: the architecture.
        gather: how rows are gathered, a key of `GEOMETRY`.
        given: the dtype of the rows.
        made: the dtype of the result.
        epilogue: the operations after the sums.
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
        + (prevent_unrolling(body) if arch == CPU else body)
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


class Kernel(NamedTuple):
    """A loaded kernel; `tile` is the tile of a GEMM, None for grouped convolutions."""

    device: Device
    source: Source
    tile: Tile | None


class Operands(NamedTuple):
    """Operands of an epilogue, each None where the kernel has none.

    Args:
        bias: [N].
        other: the second operand of the binary operation, of the result's shape.
        scalars: the scalars of the unary operation.
        scale: of each column of int8 sums, [N].
        gated: the weight and the bias of the second GEMM of a GLU.
    """

    bias: Tensor | None = None
    other: Tensor | None = None
    scalars: tuple[float, float] = (0.0, 0.0)
    scale: Tensor | None = None
    gated: tuple[Tensor, Tensor | None] | None = None


BARE = Operands()


def linear(
    kernel: Kernel,
    x: Tensor,
    weight: Tensor,
    columns: int,
    operands: Operands = BARE,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the linear layer of x [..., K] with a packed weight, as [..., columns].

    Args:
        kernel: a kernel of `source` with gather `rows`.
        x: the activation [..., K].
        weight: a weight packed by `pack_weight`.
        columns: N, the columns of the result.
        operands: operands of the epilogue.
        dtype: of the result; x's if None.
    """
    rows, other = _rows(x), operands.other
    size = (*x.shape[:-1], columns)
    out = x.new_empty(size, dtype=dtype or x.dtype)
    addend = _rows(other.expand(size)) if other is not None else None
    operands = operands._replace(other=addend)
    _launch(kernel, rows, weight, _rows(out), operands, (1, rows.shape[1]), (rows.stride(0),))
    return out


def conv(
    kernel: Kernel,
    x: Tensor,
    weight: Tensor,
    columns: int,
    window: Window,
    operands: Operands = BARE,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the convolution of x [B, C, H, W] as [B, columns, H', W'], channels-last.

    Args:
        kernel: a kernel of `source` with gather `window`.
        x: the activation [B, C, H, W].
        weight: a weight packed by `pack_kernel`.
        columns: N, the output channels.
        window: the kernel size, stride, padding and dilation.
        operands: operands of the epilogue, without a GLU.
        dtype: of the result; x's if None.
    """
    x = x.contiguous(memory_format=torch.channels_last)
    batch, channels, *image = x.shape
    height, width = sides(image, window.size, window.stride, window.padding, window.dilation)
    out = x.new_empty((batch, height, width, columns), dtype=dtype or x.dtype)
    other = operands.other
    addend = _rows(other.permute(0, 2, 3, 1)) if other is not None else None
    operands = operands._replace(other=addend)
    geometry = (
        *(*image, channels, height, width, window.across),
        *(*window.stride, *window.padding, *window.dilation),
    )
    terms = window.runs, window.terms(channels)
    _launch(kernel, x, weight, out.flatten(0, 2), operands, terms, geometry)
    return out.permute(0, 3, 1, 2)


def _launch(
    kernel: Kernel,
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    operands: Operands,
    terms: tuple[int, int],
    geometry: Sequence[int],
) -> None:
    device, source, tile = kernel
    assert tile is not None
    if not out.numel():
        return
    rows, columns = out.shape
    bias, other, scalars, scale, gated = operands
    second, second_bias = gated or (None, None)
    vectors = [t.contiguous() if t is not None else None for t in (bias, second_bias, scale)]
    pointers = (x, weight, second, *vectors, other, out)
    line = other.stride(0) if other is not None else 0
    sizes = (rows, columns, *terms, len(weight) * COLUMNS, line, out.stride(0), *scalars)
    arguments = [0 if argument is None else argument for argument in (*pointers, *sizes, *geometry)]
    groups = -(-columns // tile.columns), -(-rows // tile.rows)
    device.load(source).kernel("product")(
        arguments, (groups[0], groups[1] * tile.threads), (1, tile.threads)
    )


def _rows(x: Tensor) -> Tensor:
    """Return x [..., K] as [M, K] whose rows are each contiguous."""
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()
