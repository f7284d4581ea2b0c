"""Lowering of `ipex::decode_attention` to our kernel: a C++ call on CPUs, a Triton template."""

from typing import Any

import torch

from ipex_inductor.lowerings.attention import decode_attention_gpu
from ipex_inductor.lowerings.attention.attention_call import AttentionCall, create_call
from ipex_inductor.lowerings.common.registering import register_by_name
from ipex_inductor.ops.common.defining import Arguments
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


def _lower(call: Arguments) -> Any:
    if call.q.get_device().type == "cuda":
        return decode_attention_gpu.lower(call)
    constants = call.mask is not None, call.table is not None, call.scale
    return create_call(DecodeCall, NAME, (call.q, call.k, call.v, call.mask, call.table), constants)


def register() -> None:
    """Add the lowering to Inductor's registry."""
    register_by_name(torch.ops.ipex.decode_attention.default, _lower)
