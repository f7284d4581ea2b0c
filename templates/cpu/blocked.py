"""Products on weights in blocks: `blocked.cpp`, and how Inductor's code calls it."""

import ctypes
import functools
import logging
from typing import Any

import torch
from torch import Tensor

from ipex_inductor import ops
from ipex_inductor.templates.cpu.cpu_library import PRODUCTS, library, why_not

assert ops  # which registers ipex::blocked
log = logging.getLogger("ipex_inductor")

BINARY = ("none", "add", "mul")  # by their numbers there
UNARY = ("none", "relu", "gelu", "gelu_tanh", "silu", "sigmoid", "tanh")
ARGUMENTS: tuple[Any, ...] = (*[ctypes.c_int64] * 4, *[ctypes.c_void_p] * 5, *[ctypes.c_int32] * 2)


@functools.cache
def _kernel(dtype: torch.dtype) -> Any:
    kernel = library()[f"product_{PRODUCTS[dtype]}"]
    kernel.restype, kernel.argtypes = None, ARGUMENTS
    return kernel


def call(x: Tensor, blocks: Tensor, *rest: Any, out: Tensor) -> None:
    """`out` = what `ipex::blocked` computes: what Inductor's code calls.

    rest: bias and other if there are any, then columns, whether there is a bias, and the numbers of
    the words. x [rows, K], and out and other [rows, columns], lie without gaps in their shapes; of
    four dimensions they are channels-last images.
    """
    *tensors, columns, biased, binary, unary = rest
    rows = out.numel() // columns
    if why_not() is not None:  # of a cache that was filled where there is one
        _in_torchs_ops(x, blocks, *rest, out=out)
    elif rows:
        _kernel(x.dtype)(
            *(rows, x.numel() // rows, columns, blocks.shape[2], x.data_ptr(), blocks.data_ptr()),
            *(
                tensors[0].data_ptr() if biased else None,
                tensors[-1].data_ptr() if binary else None,
            ),
            *(out.data_ptr(), binary, unary),
        )


def _in_torchs_ops(x: Tensor, blocks: Tensor, *rest: Any, out: Tensor) -> None:
    """The same, slowly."""
    _say_once()
    *tensors, columns, biased, binary, unary = rest
    bias, other = tensors[0] if biased else None, tensors[-1] if binary else None
    words = columns, BINARY[binary], UNARY[unary], x.dim() == 4
    out.copy_(torch.ops.ipex.blocked(x, blocks, bias, other, *words))


@functools.cache
def _say_once() -> None:
    log.warning("a compiled graph runs slowly, without our products: %s", why_not())
