"""What follows a product: our names, torch's functions, oneDNN's words."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Unary:
    """`fn(product, *scalars)` defines it; `word`, `algorithm` are oneDNN's, "" if it has none."""

    fn: Callable[..., Tensor]
    word: str = ""
    algorithm: str = ""


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
    """`UNARY[unary](BINARY[binary](product, other), *scalars)`; other is shaped as the product."""
    return UNARY[unary].fn(BINARY[binary](product, other), *scalars)
