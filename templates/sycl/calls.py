"""Kernels behind `ipex::sycl_*`: on Intel GPUs, and on the CPU's SYCL device.

If a cached graph finds no kernel (the runtime is missing or another one, or a kernel fails),
torch's ops compute the result, and one log line says why.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ipex_inductor.aot_cache.log_once import say
from ipex_inductor.errors import DeviceError, SyclError
from ipex_inductor.ops.common.defining import name_arguments
from ipex_inductor.ops.conv.sycl import (
    Window,
    conv_in_torch,
    linear_in_torch,
    sycl_conv,
    sycl_linear,
)
from ipex_inductor.templates.sycl import grouped, product, words
from ipex_inductor.templates.sycl.device import Device, device_of
from ipex_inductor.templates.sycl.kernel import DTYPES
from ipex_inductor.templates.sycl.product import Epilogue, Kernel, Operands
from ipex_inductor.templates.sycl.source import Source
from ipex_inductor.templates.sycl.tiles import CPU, ENGINES, Tile, tiles

GROUPS = "groups"
GATHERS = ("rows", "window", GROUPS)


@functools.cache
def register() -> None:
    """Register the operators' SYCL kernels for CPUs and Intel GPUs (once a process)."""
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
    """Return the kernel source for an architecture (`CPU`, `xe:20.1`), and the tile of a GEMM.

    Args:
        arch: the architecture.
        dtype: the dtype's name in kernels, such as `bf16`.
        gather: one of `GATHERS`.
        few: use the tile for few rows (small M) instead of many, if no `block` is named.
        epilogue: the operations after the sums.
        block: the name of a tile, or "".
        by: the arguments of `tiles` after the dtype.

    Raises:
        KeyError: if the tables do not have it.
    """
    if gather == GROUPS:
        return grouped.source(arch, dtype, epilogue), None
    candidates = tiles(arch, dtype, *by)
    tiles_by_block = {tile.block: tile for tile in candidates}
    tile = tiles_by_block[block] if block else candidates[-1] if few else candidates[0]
    return product.source(tile, arch, gather, dtype, dtype, epilogue), tile


@functools.lru_cache(maxsize=512)
def kernel(
    device: torch.device, dtype: torch.dtype, gather: str, few: bool, epilogue: Epilogue, block: str
) -> Kernel | str:
    """Return the kernel of `source_of`, loaded on a device, or the reason why there is none.

    The result is cached, so a failure is not tried again.

    Args:
        device: a CPU or an Intel GPU.
        dtype: the dtype of the tensors.
        gather: one of `GATHERS`.
        few: whether M is small.
        epilogue: the operations after the sums.
        block: the name of a tile, or "".
    """
    if dtype not in DTYPES:
        return f"no kernel in SYCL is for {dtype}"
    try:
        sycl_device = device_of(device)
        cpu = device.type == "cpu"
        arch = CPU if cpu else sycl_device.arch
        matrix = bool(sycl_device.facts["matrix"])
        by: tuple[int, ...] = engines(sycl_device) if cpu else (matrix,)
        if arch not in ENGINES:
            return f"no kernel in SYCL is for {arch}"
        try:
            source, tile = source_of(arch, DTYPES[dtype], gather, few, epilogue, block, *by)
        except KeyError as error:
            return f"no kernel in SYCL has the block {error}"
        sycl_device.load(source)
    except (SyclError, DeviceError) as error:
        return str(error).partition("\n")[0]
    return Kernel(sycl_device, source, tile)


def engines(device: Device) -> tuple[bool, int, bool]:
    """Return the arguments `matrix`, `vector` and `dots` of `tiles` for the CPU's device."""
    facts = device.facts
    return bool(facts["matrix"]), int(facts["vector"]), bool(facts["dots"])


def forget() -> None:
    """Forget the loaded kernels, so that devices are looked up again."""
    kernel.cache_clear()


def _compute(
    loaded: Kernel | str,
    run: Callable[[Kernel], Tensor],
    instead: Callable[..., Tensor],
    **named: Any,
) -> Tensor:
    """Return the result of the kernel, or of torch's ops if there is none or it fails."""
    reason = loaded
    if isinstance(loaded, Kernel):
        try:
            return run(loaded)
        except SyclError as error:
            reason = str(error).partition("\n")[0]
    say(f"a compiled graph runs in torch's ops what it has kernels in SYCL for: {reason}")
    return instead(**named)


def _linear(*args: Any, **named: Any) -> Tensor:
    call = name_arguments(sycl_linear._opoverload, args, named)
    few = math.prod(call.x.shape[:-1]) == 1
    epilogue = Epilogue(call.binary, call.unary)

    def run(loaded: Kernel) -> Tensor:
        operands = Operands(call.bias, call.other, words.scalars(call.unary, call.scalars))
        return product.linear(loaded, call.x, call.weight, call.columns, operands)

    loaded = kernel(call.x.device, call.x.dtype, "rows", few, epilogue, call.block)
    return _compute(loaded, run, linear_in_torch, **vars(call))


def _conv(*args: Any, **named: Any) -> Tensor:
    call = name_arguments(sycl_conv._opoverload, args, named)
    epilogue = Epilogue(call.binary, call.unary)

    def run(loaded: Kernel) -> Tensor:
        sizes = (call.window, call.stride, call.padding, call.dilation)
        window = Window(*(tuple(pair) for pair in sizes))
        operands = Operands(call.bias, call.other, words.scalars(call.unary, call.scalars))
        tensors = call.x, call.weight
        if loaded.tile is None:
            device, source, _ = loaded
            result = grouped.conv(device, source, *tensors, window, call.groups, operands)
        else:
            result = product.conv(loaded, *tensors, call.columns, window, operands)
        return result if call.last else result.contiguous()

    gather = GROUPS if call.groups > 1 else "window"
    loaded = kernel(call.x.device, call.x.dtype, gather, False, epilogue, call.block)
    return _compute(loaded, run, conv_in_torch, **vars(call))
