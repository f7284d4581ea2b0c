"""Grouped and depthwise convolutions in SYCL, without a matrix engine."""

import torch
from torch import Tensor

from ipex_inductor.aot_cache.key import pairs
from ipex_inductor.ops.conv.geometry import sides
from ipex_inductor.ops.conv.sycl import Window
from ipex_inductor.templates.sycl import words
from ipex_inductor.templates.sycl.device import Device
from ipex_inductor.templates.sycl.kernel import constants, head, options, part, types
from ipex_inductor.templates.sycl.product import Epilogue, Operands
from ipex_inductor.templates.sycl.source import Entry, Source
from ipex_inductor.templates.sycl.tiles import CPU, LANES

PIXELS = 4  # of a row that share each weight load; derived: no registers are spilled
SUB_GROUPS = {CPU: 1}  # of a work-group, for architectures that differ from the default
USUAL = 8  # sub-groups of a work-group by default

_ARGUMENTS = ("*",) * 5 + ("i32",) * 17 + ("fp32",) * 2


def source(arch: str, dtype: str, epilogue: Epilogue) -> Source:
    """Return the kernel `grouped`, which sums in fp32 and rounds once."""
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
    operands: Operands,
) -> Tensor:
    """Return the grouped convolution of x [B, C, H, W] as [B, O, H', W'], channels-last.

    Args:
        device: the device of the tensors.
        made: a kernel of `source`.
        x: the activation [B, C, H, W].
        weight: a weight laid out by `pack_grouped`.
        window: the kernel size, stride, padding and dilation.
        groups: the number of groups.
        operands: operands of the epilogue: a bias, an addend and scalars.
    """
    bias, other, scalars, *_ = operands
    x = x.contiguous(memory_format=torch.channels_last)
    batch, channels, *image = x.shape
    *_, channels_per_group, out_channels = weight.shape
    height, width = sides(image, window.size, window.stride, window.padding, window.dilation)
    out = x.new_empty((batch, height, width, out_channels))
    if not out.numel():
        return out.permute(0, 3, 1, 2)
    addend = other.contiguous(memory_format=torch.channels_last) if other is not None else 0
    teams = SUB_GROUPS.get(CPU if device.waits else "", USUAL)
    arguments = (
        *(x, weight, 0 if bias is None else bias.contiguous(), addend, out, batch * height),
        *(*image, channels, height, width, out_channels),
        *(*window.size, *window.stride, *window.padding, *window.dilation),
        *(channels_per_group, out_channels // groups, *scalars),
    )
    blocks = batch * height * -(-width // PIXELS)
    whole = -(-out_channels // LANES), -(-blocks // teams) * teams * LANES
    device.load(made).kernel("grouped")(arguments, whole, (1, teams * LANES))
    return out.permute(0, 3, 1, 2)
