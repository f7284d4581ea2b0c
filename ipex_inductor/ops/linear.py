"""`ipex::linear`: a linear layer together with its epilogue."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ipex_inductor.ops import epilogue
from ipex_inductor.ops.defining import op
from ipex_inductor.ops.epilogue import UNARY


@op("linear")
def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    other: Tensor | None,
    binary: str,
    unary: str,
    scalars: list[float],
    packed: bool,
) -> Tensor:
    """`unary(binary(linear(x, weight, bias), other), *scalars)`, the words of `ops/epilogue.py`.

    x [..., K], weight [N, K], bias [N], other [..., N] -> [..., N]. `packed`: the weight is in
    oneDNN's layout (`mkldnn::_reorder_linear_weight`), which takes a unary or a binary, not both.
    Otherwise this is the reference (Inductor calls oneDNN on the plain weight); torch's linear
    defines the product.
    """
    if not packed:
        return reference(x, weight, bias, other, binary, unary, scalars)
    op = torch.ops.mkldnn._linear_pointwise
    bias = bias if bias is None else bias.contiguous()  # oneDNN does not look at its stride
    word = UNARY[unary]
    result: Tensor = (
        op.default(x, weight, bias, word.word, scalars, word.algorithm)
        if other is None
        else op.binary(x, other.contiguous(), weight, bias, binary)
    )
    return result


def reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    other: Tensor | None,
    binary: str,
    unary: str,
    scalars: list[float],
) -> Tensor:
    """What `ipex::linear` computes, in torch's own ops."""
    return epilogue.apply(F.linear(x, weight, bias), other, binary, unary, scalars)


@linear.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    other: Tensor | None,
    binary: str,
    unary: str,
    scalars: list[float],
    packed: bool,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))
