"""Kernels behind `ipex::sycl_*`: on Intel's GPUs, and on the CPU's SYCL device.

Where a graph from a cache meets none (the runtime is gone, or another, or a kernel fails), torch's
ops compute the same, and one line says why.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ipex_inductor.aot_cache.log_once import say
from ipex_inductor.errors import DeviceError, SyclError
from ipex_inductor.ops.sycl import (
    Window,
    conv_in_torch,
    linear_in_torch,
    sycl_conv,
    sycl_linear,
)
from ipex_inductor.templates.sycl import grouped, product, words
from ipex_inductor.templates.sycl.device import Device, device_of
from ipex_inductor.templates.sycl.kernel import DTYPES
from ipex_inductor.templates.sycl.product import Epilogue
from ipex_inductor.templates.sycl.source import Source
from ipex_inductor.templates.sycl.tiles import CPU, ENGINES, Tile, tiles

GROUPS = "groups"
GATHERS = ("rows", "window", GROUPS)


class Kernel(NamedTuple):
    """What a call runs, loaded: `tile` is that of a product, None for groups."""

    device: Device
    source: Source
    tile: Tile | None


@functools.cache
def register() -> None:
    """Have the operators run kernels on CPUs and Intel's GPUs (once a process)."""
    for kind in ("cpu", "xpu"):
        sycl_linear.register_kernel(kind)(_linear)
        sycl_conv.register_kernel(kind)(_conv)


def source_of(
    arch: str,
    dtype: str,
    gather: str,
    few: bool,
    epilogue: Epilogue,
    block: str = "",
    *by: Any,
) -> tuple[Source, Tile | None]:
    """The kernel of an architecture (`CPU`, `xe:20.1`), and the tile of a product.

    `gather` is one of `GATHERS`; where no `block` is named that for `few` rows, or many;
    `by`: what `tiles` takes behind a dtype. Raises `KeyError` for what the tables do not have.
    """
    if gather == GROUPS:
        return grouped.source(arch, dtype, epilogue), None
    known = tiles(arch, dtype, *by)
    named = {tile.block: tile for tile in known}
    tile = named[block] if block else known[-1] if few else known[0]
    return product.source(tile, arch, gather, dtype, dtype, epilogue), tile


@functools.lru_cache(maxsize=512)
def kernel(
    device: torch.device, dtype: torch.dtype, gather: str, few: bool, epilogue: Epilogue, block: str
) -> Kernel | str:
    """What `source_of` says, loaded on that device; or why there is none, which is asked once."""
    if dtype not in DTYPES:
        return f"no kernel in SYCL is for {dtype}"
    try:
        on = device_of(device)
        cpu = device.type == "cpu"
        arch, by = (CPU, engines(on)) if cpu else (on.arch, (bool(on.facts["matrix"]),))
        if arch not in ENGINES:
            return f"no kernel in SYCL is for {arch}"
        try:
            source, tile = source_of(arch, DTYPES[dtype], gather, few, epilogue, block, *by)
        except KeyError as error:
            return f"no kernel in SYCL has the block {error}"
        on.load(source)
    except (SyclError, DeviceError) as error:
        return str(error).partition("\n")[0]
    return Kernel(on, source, tile)


def engines(device: Device) -> tuple[bool, int, bool]:
    """What the CPU's device multiplies by: `matrix`, `vector` and `dots` of `tiles`."""
    facts = device.facts
    return bool(facts["matrix"]), int(facts["vector"]), bool(facts["dots"])


def forget() -> None:
    """Ask again what devices there are."""
    kernel.cache_clear()


def _computed(
    found: Kernel | str, run: Callable[[Kernel], Tensor], instead: Callable[..., Tensor], *args: Any
) -> Tensor:
    """By the kernel; by torch's ops where there is none, or it fails."""
    reason = found
    if isinstance(found, Kernel):
        try:
            return run(found)
        except SyclError as error:
            reason = str(error).partition("\n")[0]
    say(f"a compiled graph runs in torch's ops what it has kernels in SYCL for: {reason}")
    return instead(*args)


def _linear(
    x: Tensor,
    weight: Tensor,
    columns: int,
    bias: Tensor | None,
    other: Tensor | None,
    binary: str,
    unary: str,
    scalars: list[float],
    block: str = "",
) -> Tensor:
    few = math.prod(x.shape[:-1]) == 1

    def run(found: Kernel) -> Tensor:
        device, made, tile = found
        assert tile is not None
        given = words.scalars(unary, scalars)
        return product.linear(device, made, tile, x, weight, columns, bias, other, given)

    return _computed(
        kernel(x.device, x.dtype, "rows", few, Epilogue(binary, unary), block),
        *(run, linear_in_torch, x, weight, columns, bias, other, binary, unary, scalars),
    )


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
    block: str = "",
) -> Tensor:
    around = stride, padding, dilation

    def run(found: Kernel) -> Tensor:
        device, made, tile = found
        seen = Window((*window,), (*stride,), (*padding,), (*dilation,))
        given = words.scalars(unary, scalars)
        result = (
            grouped.conv(device, made, x, weight, seen, groups, bias, other, given)
            if tile is None
            else product.conv(device, made, tile, x, weight, columns, seen, bias, other, given)
        )
        return result if last else result.contiguous()

    gather = GROUPS if groups > 1 else "window"
    return _computed(
        kernel(x.device, x.dtype, gather, False, Epilogue(binary, unary), block),
        *(run, conv_in_torch, x, weight, columns, bias, other, window, *around, groups),
        *(binary, unary, scalars, last),
    )
