"""Lowering of `ipex::relu_norm_gradient` to Inductor's loops, fused into each reader's kernel."""

from typing import Any

import torch
from torch._inductor.lowering import lowerings, register_lowering

aten = torch.ops.aten


def _lower(gradient: Any, x: Any, *normed_by: Any) -> Any:
    mean, scale, weight, bias, _ = normed_by
    normed = lowerings[aten.mul.Tensor](lowerings[aten.sub.Tensor](x, mean), scale)
    normed = lowerings[aten.add.Tensor](lowerings[aten.mul.Tensor](normed, weight), bias)
    return lowerings[aten.where.self](lowerings[aten.le.Scalar](normed, 0.0), 0.0, gradient)


def register() -> None:
    """Add the lowering to Inductor's registry."""
    register_lowering(torch.ops.ipex.relu_norm_gradient.default, type_promotion_kind=None)(_lower)
    register_lowering(torch.ops.ipex.kept.default, type_promotion_kind=None)(
        lowerings[aten.clone.default]
    )
