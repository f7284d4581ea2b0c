"""Lowering of `ipex::decode_attention` to a call of our kernel, from Python or C++."""

from typing import Any

import torch
from torch._inductor.lowering import register_lowering

from ipex_inductor.lowerings.attention.attention_call import AttentionCall, create_call
from ipex_inductor.templates.cpu import decode_attention

NAME = "ipex_decode_attention"  # in generated code


class DecodeCall(AttentionCall):
    """Call of the kernel."""

    imported = decode_attention.__name__

    def in_cpp(self) -> str:
        """Return the C++ statements of the call."""
        q, k, v, *rest = self.inputs
        has_mask, has_table, scale = self.constant_args
        mask, table = rest[0] if has_mask else None, rest[-1] if has_table else None
        kernel = decode_attention.KERNELS[self.get_dtype()]
        return self.write_call(kernel, (q, k, v, mask, table), False, scale)


def _decode_attention(q: Any, k: Any, v: Any, mask: Any, table: Any, scale: float) -> Any:
    constants = mask is not None, table is not None, scale
    return create_call(DecodeCall, NAME, (q, k, v, mask, table), constants)


def register() -> None:
    """Add the lowering to Inductor's registry."""
    op = torch.ops.ipex.decode_attention.default
    register_lowering(op, type_promotion_kind=None)(_decode_attention)
