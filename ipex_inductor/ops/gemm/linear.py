"""`ipex::linear`: a linear layer together with its epilogue."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from ipex_inductor.ops.common import epilogue
from ipex_inductor.ops.common.defining import Arguments, fake, op
from ipex_inductor.ops.common.epilogue import UNARY


class LinearArgs(NamedTuple):
    """Arguments of `ipex::linear` in the order of its schema: tensors, or nodes for them."""

    x: Any
    weight: Any
    bias: Any
    other: Any
    binary: str
    unary: str
    scalars: Sequence[float]
    packed: bool = False

    @classmethod
    def of(cls, node: torch.fx.Node) -> Self:
        """Return the arguments of a node that calls the op."""
        args: Any = node.args
        return cls(*args)

    def epilogue(self) -> tuple[str, str, Sequence[float]]:
        """Return the binary op, the unary op, and its scalars."""
        return self.binary, self.unary, self.scalars


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


def reference(*args: Any) -> Tensor:
    """Return what `ipex::linear` computes on a plain weight, with torch's own ops.

    Args:
        args: arguments of `ipex::linear`, as in `LinearArgs`; `packed` may be left out.
    """
    call = LinearArgs(*args)
    product = F.linear(call.x, call.weight, call.bias)
    return epilogue.apply(product, call.other, *call.epilogue())


@fake(linear)
def _(call: Arguments) -> object:
    return call.x.new_empty((*call.x.shape[:-1], call.weight.shape[0]))
