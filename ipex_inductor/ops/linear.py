"""`ipex::linear`: a linear layer together with its activation."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ipex_inductor.ops.unary import UNARY


@torch.library.custom_op("ipex::linear", mutates_args=())
def linear(x: Tensor, weight: Tensor, bias: Tensor | None, unary: str, packed: bool) -> Tensor:
    """`UNARY[unary].fn(linear(x, weight, bias))`: x [..., K], weight [N, K], bias [N] -> [..., N].

    `packed`: the weight is in oneDNN's layout (`mkldnn::_reorder_linear_weight`). Otherwise this
    is the reference; torch.nn.functional.linear defines the product.
    """
    if packed:
        op = torch.ops.mkldnn._linear_pointwise
        bias = bias if bias is None else bias.contiguous()  # oneDNN does not look at its stride
        result: Tensor = op(x, weight, bias, *UNARY[unary].words)
        return result
    return reference(x, weight, bias, unary)


def reference(x: Tensor, weight: Tensor, bias: Tensor | None, unary: str) -> Tensor:
    """What `ipex::linear` computes, in torch's own ops."""
    return UNARY[unary].fn(F.linear(x, weight, bias))


@linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, unary: str, packed: bool) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))
