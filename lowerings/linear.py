"""`ipex::linear` to oneDNN's linear with a fused activation."""

from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import register_lowering

from ipex_inductor.ops.unary import UNARY


def _linear(x: Any, weight: Any, bias: Any, unary: str, packed: bool) -> Any:
    """An extern call; the packed weight is opaque, so nothing may ask for its strides."""
    if not packed:
        raise AssertionError("passes/packing.py leaves no unpacked ipex::linear")
    if bias is not None:  # oneDNN does not look at its stride
        bias = ir.ExternKernel.require_contiguous(ir.ExternKernel.realize_input(bias))
    result = ir.FallbackKernel.create(
        torch.ops.mkldnn._linear_pointwise.default,
        ir.ExternKernel.require_contiguous(x),
        weight,
        bias,
        *UNARY[unary].words,
    )
    return ir.TensorBox.create(result)


def register() -> None:
    """Add the lowerings of this family to Inductor's registry."""
    register_lowering(torch.ops.ipex.linear.default, type_promotion_kind=None)(_linear)
