"""Kernels behind `ipex::sycl_*`, on the CPU's SYCL device."""

import functools
import math

from torch import Tensor

from ipex_inductor.ops.sycl import Window, sycl_conv, sycl_linear
from ipex_inductor.templates.sycl import grouped, product, words
from ipex_inductor.templates.sycl.device import Device, device_of
from ipex_inductor.templates.sycl.kernel import DTYPES
from ipex_inductor.templates.sycl.product import Epilogue
from ipex_inductor.templates.sycl.source import Source
from ipex_inductor.templates.sycl.tiles import CPU, Tile, tiles

GATHERS = ("rows", "window")


@functools.cache
def register() -> None:
    """Have the operators run kernels on CPUs (once a process)."""
    sycl_linear.register_kernel("cpu")(_linear)
    sycl_conv.register_kernel("cpu")(_conv)


@functools.lru_cache(maxsize=512)
def source_of(
    device: Device, dtype: str, gather: str, few: bool, epilogue: Epilogue
) -> tuple[Tile, Source]:
    """The block for `few` rows, or many, and its kernel; `gather` is one of `GATHERS`."""
    known = tiles(CPU, dtype, bool(device.facts["matrix"]))
    tile = known[-1] if few else known[0]
    return tile, product.source(tile, CPU, gather, dtype, dtype, epilogue)


@functools.lru_cache(maxsize=512)
def source_of_groups(dtype: str, epilogue: Epilogue) -> Source:
    """The kernel of a convolution in groups."""
    return grouped.source(CPU, dtype, epilogue)


def _linear(
    x: Tensor,
    weight: Tensor,
    columns: int,
    bias: Tensor | None,
    other: Tensor | None,
    binary: str,
    unary: str,
    scalars: list[float],
) -> Tensor:
    device, few = device_of(x.device), math.prod(x.shape[:-1]) == 1
    tile, made = source_of(device, DTYPES[x.dtype], "rows", few, Epilogue(binary, unary))
    given = words.scalars(unary, scalars)
    return product.linear(device, made, tile, x, weight, columns, bias, other, given)


def _conv(
    x: Tensor,
    weight: Tensor,
    columns: int,
    bias: Tensor | None,
    other: Tensor | None,
    window: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    binary: str,
    unary: str,
    scalars: list[float],
    last: bool,
) -> Tensor:
    device, dtype, epilogue = device_of(x.device), DTYPES[x.dtype], Epilogue(binary, unary)
    seen = Window((*window,), (*stride,), (*padding,), (*dilation,))
    given = words.scalars(unary, scalars)
    if groups > 1:
        made = source_of_groups(dtype, epilogue)
        result = grouped.conv(device, made, x, weight, seen, groups, bias, other, given)
    else:
        tile, made = source_of(device, dtype, "window", False, epilogue)
        result = product.conv(device, made, tile, x, weight, columns, seen, bias, other, given)
    return result if last else result.contiguous()
