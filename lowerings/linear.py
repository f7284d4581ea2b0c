"""`ipex::linear_unary` and `ipex::linear_packed` to oneDNN's linear with a fused activation."""

from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import register_lowering

from ipex_inductor.ops.linear import ONEDNN


def _linear_unary(x: Any, weight: Any, bias: Any, unary: str) -> Any:
    return _linear_packed(x, ir.ExternKernel.require_contiguous(weight), bias, unary)


def _linear_packed(x: Any, weight: Any, bias: Any, unary: str) -> Any:
    """An extern call; the packed weight is opaque, so nothing may ask for its strides."""
    attribute, algorithm = ONEDNN[unary]
    x = ir.ExternKernel.require_contiguous(x)
    kernel = torch.ops.mkldnn._linear_pointwise.default
    result = ir.FallbackKernel.create(kernel, x, weight, bias, attribute, [], algorithm)
    return ir.TensorBox.create(result)


LOWERINGS = {
    torch.ops.ipex.linear_unary.default: _linear_unary,
    torch.ops.ipex.linear_packed.default: _linear_packed,
}


def register() -> None:
    """Add the lowerings of this family to Inductor's registry."""
    for op, lowering in LOWERINGS.items():
        register_lowering(op, type_promotion_kind=None)(lowering)
