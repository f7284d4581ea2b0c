"""`ipex::linear`: a linear layer together with its epilogue."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ipex_inductor.ops.common import epilogue
from ipex_inductor.ops.common.defining import op
from ipex_inductor.ops.common.epilogue import UNARY


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
    """Return `unary(binary(linear(x, weight, bias), other), *scalars)`.

    A plain weight runs the reference, which torch's linear defines (Inductor calls oneDNN on it).

    Args:
        x: [..., K].
        weight: [N, K].
        bias: [N].
        other: [..., N].
        binary: name in `ops/common/epilogue.py`.
        unary: name in `ops/common/epilogue.py`.
        scalars: arguments of the unary.
        packed: True if the weight is in oneDNN's layout (`mkldnn::_reorder_linear_weight`), which
            takes a unary or a binary, not both.

    Returns:
        [..., N].
    """
    if not packed:
        return reference(x, weight, bias, other, binary, unary, scalars)
    op = torch.ops.mkldnn._linear_pointwise
    bias = bias if bias is None else bias.contiguous()  # oneDNN ignores the stride of a bias
    fused = UNARY[unary]
    result: Tensor = (
        op.default(x, weight, bias, fused.onednn_name, scalars, fused.algorithm)
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
    """Return what `ipex::linear` computes, with torch's own ops.

    Args:
        x: [..., K].
        weight: [N, K].
        bias: [N].
        other: [..., N].
        binary: name in `ops/common/epilogue.py`.
        unary: name in `ops/common/epilogue.py`.
        scalars: arguments of the unary.
    """
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
