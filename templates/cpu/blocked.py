"""GEMMs on weights in blocks: `blocked.cpp`, and how Inductor's code calls it."""

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

# What our kernels compute, by their numbers in blocked.cpp.
BINARY = ("none", "add", "mul")
UNARY = ("none", "relu", "gelu", "gelu_tanh", "silu", "sigmoid", "tanh")
ARGUMENTS: tuple[Any, ...] = (*[ctypes.c_int64] * 4, *[ctypes.c_void_p] * 5, *[ctypes.c_int32] * 2)


@functools.cache
def _kernel(dtype: torch.dtype) -> Any:
    kernel = library()[f"product_{PRODUCTS[dtype]}"]
    kernel.restype, kernel.argtypes = None, ARGUMENTS
    return kernel


def call(x: Tensor, blocks: Tensor, *rest: Any, out: Tensor) -> None:
    """Write `ipex::blocked` to `out`; called by Inductor's code.

    Args:
        x: [M, K], without gaps; of four dimensions channels-last.
        blocks: the weight in blocks.
        rest: the bias and the addend, if any, then the number of columns N, whether there is a
            bias, and the numbers of the binary and the unary operation.
        out: [M, N], as is the addend; both are laid out as x.
    """
    *tensors, columns, biased, binary, unary = rest
    rows = out.numel() // columns
    if why_not() is not None:  # the graph was cached where there was one
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
    """Compute `call` with torch's ops, which is slow."""
    _say_once()
    *tensors, columns, biased, binary, unary = rest
    bias, addend = tensors[0] if biased else None, tensors[-1] if binary else None
    options = columns, BINARY[binary], UNARY[unary], x.dim() == 4
    out.copy_(torch.ops.ipex.blocked(x, blocks, bias, addend, *options))


@functools.cache
def _say_once() -> None:
    log.warning("a compiled graph runs slowly, without our products: %s", why_not())
