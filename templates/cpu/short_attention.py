"""Attention over few keys on a CPU: `short_attention.cpp`, and how Inductor's code calls it."""

import ctypes
import functools
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ipex_inductor import ops
from ipex_inductor.templates.cpu.cpu_library import NAMES, library, why_not

assert ops  # which registers ipex::short_attention
log = logging.getLogger("ipex_inductor")

ARGUMENTS: tuple[Any, ...] = (ctypes.c_void_p, ctypes.c_float, *[ctypes.c_void_p] * 5)


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
    if why_not() is not None:  # the graph was cached where there was one
        _say_once()
        mask = masks[0] if masks else None
        out.copy_(torch.ops.ipex.short_attention(q, k, v, mask, causal, scale))
        return
    q, k, v = (t if lies_in_rows(t) else t.contiguous() for t in (q, k, v))
    mask = masks[0].expand(*q.shape[:3], k.shape[2]) if masks else None
    if mask is not None and mask.stride(3) not in (0, 1):
        mask = mask.contiguous()
    strides = [t.stride() for t in (q, k, v, out)]
    steps = mask.stride() if mask is not None else (0,) * 4
    pointers = [0 if t is None else t.data_ptr() for t in (q, k, v, mask, out)]
    _kernel(q.dtype)(sizes_in_c(q.shape, k.shape[2], causal, *strides, steps), scale, *pointers)


def lies_in_rows(x: Tensor) -> bool:
    """Return whether rows have no gaps and, for 16 bits, begin at whole pairs of elements."""
    stride = x.stride()
    return stride[3] == 1 and (x.element_size() == 4 or stride[2] % 2 == 0)


def sizes_of(
    q: Sequence[int], keys: int, causal: bool, strides: Sequence[Sequence[int]]
) -> list[int]:
    """Return the numbers of `Sizes` of the C++.

    Args:
        q: the query's shape.
        keys: the number of keys.
        causal: whether attention is causal.
        strides: of q, k, v, the result and the mask.
    """
    batch, heads, queries, width = q
    *lines, mask = strides
    steps = (n for line in lines for n in line[:3])
    return [batch, heads, queries, keys, width, int(causal), *steps, *mask]


@functools.lru_cache(4096)
def sizes_in_c(q: Sequence[int], keys: int, causal: bool, *strides: Sequence[int]) -> Any:
    """Return the numbers of `sizes_of` as an array of C."""
    numbers = sizes_of(q, keys, causal, strides)
    return (ctypes.c_int64 * len(numbers))(*numbers)


@functools.cache
def _kernel(dtype: torch.dtype) -> Any:
    kernel = library()[f"attention_{NAMES[dtype]}"]
    kernel.restype, kernel.argtypes = None, ARGUMENTS
    return kernel


@functools.cache
def _say_once() -> None:
    log.warning("a compiled graph runs slowly, without our attention: %s", why_not())
