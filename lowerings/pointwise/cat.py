"""Lowering of `ipex::cat` to Inductor's concat kernel, into which each part is computed."""

from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import register_lowering


def _lower(parts: list[Any], dim: int) -> Any:
    return ir.TensorBox(ir.ConcatKernel.create(parts, dim % len(parts[0].get_size())))


def register() -> None:
    """Add the lowering to Inductor's registry."""
    register_lowering(torch.ops.ipex.cat.default, type_promotion_kind=None)(_lower)
