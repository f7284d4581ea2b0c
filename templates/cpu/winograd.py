"""Convolutions with 3 x 3 kernels: `winograd.cpp`, and how Inductor's code calls it."""

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ipex_inductor import ops
from ipex_inductor.reporting.decisions import warn_once
from ipex_inductor.templates.cpu.blocked import UNARY
from ipex_inductor.templates.cpu.cpu_library import NAMES, library, why_not

assert ops  # which registers ipex::winograd

BINARY = ("none", "add")
ARGUMENTS: tuple[Any, ...] = (*[ctypes.c_void_p] * 6, ctypes.c_int32)


def call(x: Tensor, weight: Tensor, *rest: Any, out: Tensor) -> None:
    """Write `ipex::winograd` to `out`; called by Inductor's code.

    Args:
        x: the activation [B, C, H, W], channels-last without gaps.
        weight: the transformed weight.
        rest: the bias and the addend, if any, then the padding, whether there is a bias, whether
            there is an addend, and the number of the unary operation.
        out: the result, channels-last without gaps, as is the addend.
    """
    *tensors, padding, biased, added, unary = rest
    bias, addend = tensors[0] if biased else None, tensors[-1] if added else None
    if why_not() is not None:  # the graph was cached where there was one
        warn_once(f"a compiled graph runs slowly, without our convolutions: {why_not()}")
        options = [*padding], BINARY[added], UNARY[unary]
        out.copy_(torch.ops.ipex.winograd(x, weight, bias, addend, *options))
        return
    pointers = (None if t is None else t.data_ptr() for t in (x, weight, bias, addend, out))
    _kernel(x.dtype)(_plane(x.shape, out.shape, padding), *pointers, unary)


def plane_of(x: Sequence[int], out: Sequence[int], padding: Sequence[int]) -> list[int]:
    """Return the numbers of `Plane` of the C++, from the shapes of an activation and a result."""
    return [*x, out[1], *padding, *out[2:]]


@functools.lru_cache(4096)
def _plane(x: Sequence[int], out: Sequence[int], padding: Sequence[int]) -> Any:
    numbers = plane_of(x, out, padding)
    return (ctypes.c_int64 * len(numbers))(*numbers)


@functools.cache
def _kernel(dtype: torch.dtype) -> Any:
    kernel = library()[f"winograd_{NAMES[dtype]}"]
    kernel.restype, kernel.argtypes = None, ARGUMENTS
    return kernel
