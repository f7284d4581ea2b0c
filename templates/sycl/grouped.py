"""Convolutions in groups in SYCL, each channel by itself among them, without a matrix engine."""

import torch
from torch import Tensor

from ipex_inductor.aot_cache.key import pairs
from ipex_inductor.ops.stem import sides
from ipex_inductor.ops.sycl import Window
from ipex_inductor.templates.sycl import words
from ipex_inductor.templates.sycl.device import Device
from ipex_inductor.templates.sycl.kernel import constants, head, options, part, types
from ipex_inductor.templates.sycl.product import Epilogue
from ipex_inductor.templates.sycl.source import Entry, Source
from ipex_inductor.templates.sycl.tiles import CPU, LANES

PIXELS = 4  # of a row that share what is read of a weight; derived: no registers are spilled
SUB_GROUPS = {CPU: 1}  # of a work-group, where there is a reason
USUAL = 8

_ARGUMENTS = ("*",) * 5 + ("i32",) * 17 + ("fp32",) * 2


def source(arch: str, dtype: str, epilogue: Epilogue) -> Source:
    """The kernel `grouped`, summing in fp32 and rounding once."""
    sizes = {"SG": LANES, "SUB_GROUPS": SUB_GROUPS.get(arch, USUAL), "PIXELS": PIXELS}
    text = (
        head()
        + types({"In": dtype})
        + constants(sizes | {"CPU_LANES": arch == CPU})
        + words.functions(epilogue.binary, epilogue.unary)
        + part("grouped.cpp")
    )
    problem = {"template": "grouped convolution", "dtype": dtype, "unary": epilogue.unary}
    return Source(
        text,
        (Entry("grouped", _ARGUMENTS, 2, LANES),),
        options(arch),
        needs=("fp16",) * (dtype == "fp16"),
        problem=pairs(problem | sizes | {"binary": epilogue.binary}),
    )


def conv(
    device: Device,
    made: Source,
    x: Tensor,
    weight: Tensor,
    window: Window,
    groups: int,
    bias: Tensor | None = None,
    other: Tensor | None = None,
    scalars: tuple[float, float] = (0.0, 0.0),
) -> Tensor:
    """`made` on x [B, C, H, W] with a weight of `by_groups`, bias [O], other as the result.

    The result [B, O, H', W'] is channels-last.
    """
    x = x.contiguous(memory_format=torch.channels_last)
    batch, channels, *image = x.shape
    *_, of_each, out_channels = weight.shape
    height, width = sides(image, window.size, window.stride, window.padding, window.dilation)
    out = x.new_empty((batch, height, width, out_channels))
    if not out.numel():
        return out.permute(0, 3, 1, 2)
    beside = other.contiguous(memory_format=torch.channels_last) if other is not None else 0
    teams = SUB_GROUPS.get(CPU if device.waits else "", USUAL)
    given = (
        *(x, weight, 0 if bias is None else bias.contiguous(), beside, out, batch * height),
        *(*image, channels, height, width, out_channels),
        *(*window.size, *window.stride, *window.padding, *window.dilation),
        *(of_each, out_channels // groups, *scalars),
    )
    blocks = batch * height * -(-width // PIXELS)
    whole = -(-out_channels // LANES), -(-blocks // teams) * teams * LANES
    device.load(made).kernel("grouped")(given, whole, (1, teams * LANES))
    return out.permute(0, 3, 1, 2)
