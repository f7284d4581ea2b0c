"""`ipex::linear` to oneDNN's linear with a fused epilogue."""

from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import register_lowering

from ipex_inductor.lowerings.onednn import OneDnnCall
from ipex_inductor.ops.epilogue import UNARY


def _linear(
    x: Any,
    weight: Any,
    bias: Any,
    other: Any,
    binary: str,
    unary: str,
    scalars: list[float],
    packed: bool,
) -> Any:
    """A call on a plain weight (training) or a packed one, which has no strides to ask for."""
    op, word = torch.ops.mkldnn._linear_pointwise, UNARY[unary]
    tensors = [_contiguous(x), weight if packed else _contiguous(weight)]
    constants: list[Any] = [word.word, scalars, word.algorithm]
    if other is not None:
        tensors.insert(1, _contiguous(other))
        constants = [binary]
    if bias is None:
        constants.insert(0, None)
    else:
        tensors.append(_contiguous(bias))  # oneDNN does not look at its stride
    size = [*x.get_size()[:-1], weight.get_size()[0]]
    layout = ir.FixedLayout(x.get_device(), x.get_dtype(), size)
    overload = op.default if other is None else op.binary
    return ir.TensorBox.create(OneDnnCall(overload, layout, tensors, constants))


def _contiguous(x: Any) -> Any:
    return ir.ExternKernel.require_contiguous(ir.ExternKernel.realize_input(x))


def register() -> None:
    """Add the lowerings of this family to Inductor's registry."""
    register_lowering(torch.ops.ipex.linear.default, type_promotion_kind=None)(_linear)
