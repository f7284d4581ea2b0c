"""Attention of few queries over a cache: `decode_attention.cpp`, and how Inductor calls it."""

import ctypes
import functools
import logging
from typing import Any

import torch
from torch import Tensor

from ipex_inductor import ops
from ipex_inductor.templates.cpu.cpu_library import PRODUCTS, library, why_not
from ipex_inductor.templates.cpu.short_attention import sizes_in_c

assert ops  # which registers ipex::decode_attention
log = logging.getLogger("ipex_inductor")

ARGUMENTS: tuple[Any, ...] = (ctypes.c_void_p, ctypes.c_float, *[ctypes.c_void_p] * 6)


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
    table = tensors[-1] if has_table else None
    if why_not() is not None:  # the graph was cached where there was one
        _log_once()
        out.copy_(torch.ops.ipex.decode_attention(q, k, v, mask, table, scale))
        return
    q, k, v = (t if t.stride(3) == 1 else t.contiguous() for t in (q, k, v))
    mask = mask if mask is None else mask.expand(*q.shape[:3], k.shape[2])
    if mask is not None and mask.stride(3) not in (0, 1):
        mask = mask.contiguous()
    table = table if table is None else table.contiguous()
    strides = [t.stride() for t in (q, k, v, out)]
    steps = mask.stride() if mask is not None else (0,) * 4
    pointers = [0 if t is None else t.data_ptr() for t in (q, k, v, mask, table, out)]
    _kernel(q.dtype)(sizes_in_c(q.shape, k.shape[2], False, *strides, steps), scale, *pointers)


@functools.cache
def _kernel(dtype: torch.dtype) -> Any:
    kernel = library()[f"decode_{PRODUCTS[dtype]}"]
    kernel.restype, kernel.argtypes = None, ARGUMENTS
    return kernel


@functools.cache
def _log_once() -> None:
    log.warning("a compiled graph runs slowly, without our decode attention: %s", why_not())
