"""Attention of few queries over a cache: `decode_attention.cpp`, and how Inductor calls it."""

from typing import Any

import torch
from torch import Tensor

from ipex_inductor import ops
from ipex_inductor.templates.cpu.attention_call import call_kernel, log_slow
from ipex_inductor.templates.cpu.cpu_library import PRODUCTS, why_not

assert ops  # which registers ipex::decode_attention
KERNELS = {dtype: f"decode_{name}" for dtype, name in PRODUCTS.items()}


def call(q: Tensor, k: Tensor, v: Tensor, *rest: Any, out: Tensor) -> None:
    """Write `ipex::decode_attention` to `out`; called by Inductor's code.

    Args:
        q: the query [B, heads, queries, width].
        k: the key [B, heads, keys, width].
        v: the value [B, heads, keys, width].
        rest: the mask and the table of beams, if any, then whether each is there, and the scale.
        out: the result, as q.
    """
    *tensors, has_mask, has_table, scale = rest
    mask = tensors[0] if has_mask else None
    table = tensors[-1].contiguous() if has_table else None
    if why_not() is not None:  # the graph was cached where there was one
        log_slow("decode attention")
        out.copy_(torch.ops.ipex.decode_attention(q, k, v, mask, table, scale))
        return
    q, k, v = (t if t.stride(3) == 1 else t.contiguous() for t in (q, k, v))
    call_kernel(KERNELS[q.dtype], (q, k, v), mask, (table,), out, (False, scale))
