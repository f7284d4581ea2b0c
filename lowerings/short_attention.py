"""`ipex::short_attention` to a call of `templates/short_attention.py`."""

from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import register_lowering
from torch._inductor.virtualized import V

from ipex_inductor.lowerings.blocked import OurCall, expressions
from ipex_inductor.templates import short_attention

NAME = "ipex_short_attention"  # in generated code


def _short_attention(q: Any, k: Any, v: Any, mask: Any, causal: bool, scale: float) -> Any:
    tensors = [ir.ExternKernel.realize_input(t) for t in (q, k, v, mask) if t is not None]
    value = V.graph.current_node.meta["val"]
    layout = ir.FixedLayout(q.get_device(), q.get_dtype(), *expressions(value))
    call = OurCall(layout, tensors, (causal, scale), python_kernel_name=NAME)
    call.imported = short_attention.__name__
    return ir.TensorBox.create(call)


def register() -> None:
    """Add the lowering to Inductor's registry."""
    op = torch.ops.ipex.short_attention.default
    register_lowering(op, type_promotion_kind=None)(_short_attention)
