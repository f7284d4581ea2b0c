"""Calls of the attention kernels of the CPU library, with strided tensors."""

import ctypes
import functools
import logging
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ipex_inductor.templates.cpu.cpu_library import library, why_not

log = logging.getLogger("ipex_inductor")


def call_kernel(
    name: str,
    operands: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    others: Sequence[Tensor | None],
    out: Tensor,
    numbers: tuple[bool, float],
) -> None:
    """Call an attention kernel.

    Args:
        name: name of the kernel in the library.
        operands: query, key and value, whose rows have no gaps.
        mask: the mask, or None.
        others: what else the kernel reads.
        out: the result.
        numbers: whether query i attends to the keys up to i alone, and the factor of the scores.
    """
    (q, k, v), (causal, scale) = operands, numbers
    if mask is not None:
        mask = mask.expand(*q.shape[:3], k.shape[2])
        if mask.stride(3) not in (0, 1):
            mask = mask.contiguous()
    strides = [t.stride() for t in (q, k, v, out)]
    steps = mask.stride() if mask is not None else (0,) * 4
    pointers = [0 if t is None else t.data_ptr() for t in (q, k, v, mask, *others, out)]
    kernel = _kernel(name, len(pointers))
    kernel(sizes_in_c(q.shape, k.shape[2], causal, *strides, steps), scale, *pointers)


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
def _kernel(name: str, pointers: int) -> Any:
    kernel = library()[name]
    kernel.restype = None
    kernel.argtypes = [ctypes.c_void_p, ctypes.c_float, *[ctypes.c_void_p] * pointers]
    return kernel


@functools.cache
def log_slow(kernel: str) -> None:
    """Log once that a graph, which was cached with one of our kernels, runs without it."""
    log.warning("a compiled graph runs slowly, without our %s: %s", kernel, why_not())
