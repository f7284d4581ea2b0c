"""Attention over few keys on a CPU: `short_attention.cpp`, and how Inductor's code calls it."""

from typing import Any

import torch
from torch import Tensor

from ipex_inductor import ops
from ipex_inductor.templates.cpu.attention_call import call_kernel, lies_in_rows, log_slow
from ipex_inductor.templates.cpu.cpu_library import NAMES, why_not

assert ops  # which registers ipex::short_attention
KERNELS = {dtype: f"attention_{name}" for dtype, name in NAMES.items()}


def call(q: Tensor, k: Tensor, v: Tensor, *rest: Any, out: Tensor) -> None:
    """Write `ipex::short_attention` to `out`; called by Inductor's code.

    Args:
        q: the query [B, heads, queries, width].
        k: the key [B, heads, keys, width].
        v: the value [B, heads, keys, width].
        rest: the mask, if any, then `causal` and the scale.
        out: the result, as q.
    """
    *masks, causal, scale = rest
    mask = masks[0] if masks else None
    if why_not() is not None:  # the graph was cached where there was one
        log_slow("attention")
        out.copy_(torch.ops.ipex.short_attention(q, k, v, mask, causal, scale))
        return
    q, k, v = (t if lies_in_rows(t) else t.contiguous() for t in (q, k, v))
    call_kernel(KERNELS[q.dtype], (q, k, v), mask, (), out, (causal, scale))
