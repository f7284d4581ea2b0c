"""Lowering of linear layers on weights in FP8: on GPUs a cast of the weight and a GEMM."""

from typing import Any

import torch
from torch._inductor.lowering import fallback_handler, lowerings

from ipex_inductor.lowerings.common.registering import register_by_name
from ipex_inductor.lowerings.problem import selector_hook
from ipex_inductor.ops.common.defining import Arguments
from ipex_inductor.ops.quant import fp8

aten, ipex, prims = torch.ops.aten, torch.ops.ipex, torch.ops.prims


def _lower_weight_linear(call: Arguments) -> Any:
    arguments = call.x, call.weight, call.steps, call.bias
    if call.x.get_device().type == "cpu":
        fall_back: Any = fallback_handler
        return fall_back(ipex.fp8_weight_linear.default, False)(*arguments)
    cast = lowerings[prims.convert_element_type.default]
    exact = lowerings[aten.mul.Tensor](cast(call.weight, torch.float32), call.steps)
    weight = lowerings[aten.permute.default](cast(exact, call.x.get_dtype()), [1, 0])
    if call.bias is None:
        return lowerings[aten.mm.default](call.x, weight)
    return lowerings[aten.addmm.default](call.bias, call.x, weight)


def why_not(packaged: bool, device: torch.device, calls: bool = True) -> str | None:
    """Return why FP8 GEMMs of a device cannot be called; None if they can.

    Args:
        packaged: whether the code is part of a package.
        device: device of the GEMM.
        calls: False for code that converts FP8 numbers and calls no GEMM.
    """
    rest = "it is computed in floating point"
    if packaged and calls:
        return f"packages have no FP8 GEMMs, which Python calls: {rest}"
    if device.type == "cpu":
        return None
    if device.type != "cuda" or torch.version.hip:
        return f"no FP8 GEMM for {'ROCm' if torch.version.hip else device.type} yet: {rest}"
    reason = fp8.why_no_tensor_cores(selector_hook.arch_of(device))
    return f"{reason}: {rest}" if reason else None


def register() -> None:
    """Add the lowering to Inductor's registry."""
    register_by_name(ipex.fp8_weight_linear.default, _lower_weight_linear)
