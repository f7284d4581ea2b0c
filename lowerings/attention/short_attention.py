"""Lowering of `ipex::short_attention` to a call of our kernel, from Python or C++."""

from typing import Any

import torch
from torch._inductor.lowering import register_lowering

from ipex_inductor.lowerings.attention.attention_call import AttentionCall, create_call
from ipex_inductor.templates.cpu import short_attention

NAME = "ipex_short_attention"  # in generated code


class ShortCall(AttentionCall):
    """Call of the kernel."""

    imported = short_attention.__name__

    def in_cpp(self) -> str:
        """Return the C++ statements of the call."""
        q, k, v, *masks = self.inputs
        kernel = short_attention.KERNELS[self.get_dtype()]
        return self.write_call(kernel, (q, k, v, *(masks or [None])), *self.constant_args)


def _short_attention(q: Any, k: Any, v: Any, mask: Any, causal: bool, scale: float) -> Any:
    return create_call(ShortCall, NAME, (q, k, v, mask), (causal, scale))


def register() -> None:
    """Add the lowering to Inductor's registry."""
    op = torch.ops.ipex.short_attention.default
    register_lowering(op, type_promotion_kind=None)(_short_attention)
