"""Activations that oneDNN fuses behind a product: our name, torch's function, oneDNN's words."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Unary:
    """`fn` defines it; the rest are the arguments of oneDNN's fused ops."""

    fn: Callable[[Tensor], Tensor]
    attribute: str
    scalars: tuple[float, ...] = ()
    algorithm: str = ""

    @property
    def words(self) -> tuple[str, list[float], str]:
        """The arguments of a oneDNN op that ends in this activation."""
        return self.attribute, list(self.scalars), self.algorithm

    @property
    def words_after_add(self) -> tuple[str | None, list[float], str]:
        """The same behind an addend, where no activation is None."""
        return None if self.attribute == "none" else self.attribute, *self.words[1:]


UNARY = {
    "none": Unary(lambda x: x, "none"),
    "relu": Unary(F.relu, "relu"),
    "relu6": Unary(F.relu6, "hardtanh", (0.0, 6.0)),
    "sigmoid": Unary(torch.sigmoid, "sigmoid"),
    "tanh": Unary(torch.tanh, "tanh"),
    "gelu": Unary(F.gelu, "gelu", (), "none"),
    "gelu_tanh": Unary(functools.partial(F.gelu, approximate="tanh"), "gelu", (), "tanh"),
    "silu": Unary(F.silu, "swish"),
    "hardswish": Unary(F.hardswish, "hardswish"),
    "hardsigmoid": Unary(F.hardsigmoid, "hardsigmoid"),
}
