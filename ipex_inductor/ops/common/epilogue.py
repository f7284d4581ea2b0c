"""Epilogues of GEMMs and convolutions: their names here, torch's functions, oneDNN's names.

A new activation is a row of `UNARY` and also goes to:

- `passes/fusion/epilogue.py`: each way to write it, so that rules find it;
- `passes/engine/whole_ops.py`: its aten op, if Inductor decomposes that; and to the test of it;
- `templates/sycl/words.py`: its formula in C++, at the same place as here;
- `templates/cpu/cached_primitives.py`: oneDNN's number, if it has an `onednn_name`;
- `passes/fusion/library.py`: for convolutions on GPUs, where Inductor computes all others;
- `templates/cpu/blocked.cpp` and `blocked.py`: if our own CPU kernels are to compute it.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Unary:
    """A unary epilogue `fn(product, *scalars)`; `onednn_name` and `algorithm` may be empty."""

    fn: Callable[..., Tensor]
    onednn_name: str = ""
    algorithm: str = ""


def quick_gelu(x: Tensor) -> Tensor:
    """Return CLIP's approximation of GELU, `x sigmoid(1.702 x)` (arXiv:1606.08415, section 2)."""
    return x * torch.sigmoid(1.702 * x)


UNARY = {
    "none": Unary(lambda x: x, "none"),
    "abs": Unary(torch.abs),
    "elu": Unary(F.elu),
    "exp": Unary(torch.exp),
    "gelu": Unary(F.gelu, "gelu", "none"),
    "gelu_tanh": Unary(functools.partial(F.gelu, approximate="tanh"), "gelu", "tanh"),
    "hardsigmoid": Unary(F.hardsigmoid, "hardsigmoid"),
    "hardswish": Unary(F.hardswish, "hardswish"),
    "hardtanh": Unary(F.hardtanh, "hardtanh"),
    "leaky_relu": Unary(F.leaky_relu, "leaky_relu"),
    "log": Unary(torch.log),
    "mish": Unary(F.mish),
    "pow": Unary(torch.pow),
    "quick_gelu": Unary(quick_gelu),
    "relu": Unary(F.relu, "relu"),
    "round": Unary(torch.round),
    "sigmoid": Unary(torch.sigmoid, "sigmoid"),
    "silu": Unary(F.silu, "swish"),
    "sqrt": Unary(torch.sqrt),
    "square": Unary(torch.square),
    "tanh": Unary(torch.tanh, "tanh"),
}

BINARY: dict[str, Callable[..., Tensor]] = {
    "none": lambda product, other: product,
    "add": torch.add,
    "mul": torch.mul,
    "sub": torch.sub,
}


def apply(
    product: Tensor, other: Tensor | None, binary: str, unary: str, scalars: Sequence[float]
) -> Tensor:
    """Return `UNARY[unary](BINARY[binary](product, other), *scalars)`.

    Args:
        product: result of the GEMM or convolution.
        other: shaped as the product; None if `binary` is "none".
        binary: key of `BINARY`.
        unary: key of `UNARY`.
        scalars: further arguments of the unary.
    """
    return UNARY[unary].fn(BINARY[binary](product, other), *scalars)
