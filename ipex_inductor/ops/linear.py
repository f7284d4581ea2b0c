"""`ipex::linear_unary` and `ipex::linear_packed`: a linear layer together with its activation."""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

# Our name of an activation -> the torch function that defines it.
UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
}

# Our name of an activation -> oneDNN's (attribute, algorithm).
ONEDNN = {"none": ("none", ""), "gelu": ("gelu", "none"), "gelu_tanh": ("gelu", "tanh")}


@torch.library.custom_op("ipex::linear_unary", mutates_args=())
def linear_unary(x: Tensor, weight: Tensor, bias: Tensor | None, unary: str) -> Tensor:
    """`UNARY[unary](linear(x, weight, bias))`: x [..., K], weight [N, K], bias [N] -> [..., N].

    The reference implementation; torch.nn.functional.linear defines the product.
    """
    return UNARY[unary](F.linear(x, weight, bias))


@torch.library.custom_op("ipex::linear_packed", mutates_args=())
def linear_packed(x: Tensor, weight: Tensor, bias: Tensor | None, unary: str) -> Tensor:
    """`linear_unary` on a CPU weight that oneDNN has packed (`mkldnn::_reorder_linear_weight`)."""
    attribute, algorithm = ONEDNN[unary]
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, attribute, [], algorithm)
    return result


@linear_unary.register_fake
@linear_packed.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, unary: str) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))
