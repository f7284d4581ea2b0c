"""`ipex::conv` to oneDNN's convolution with a fused addend and activation."""

from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import register_lowering
from torch._inductor.virtualized import V

from ipex_inductor.ops.unary import UNARY


def _conv(
    x: Any,
    weight: Any,
    bias: Any,
    other: Any,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    unary: str,
    packed: str,
) -> Any:
    """An extern call on channels-last tensors, so that no reorder stands between convolutions.

    An `ExternKernelAlloc` of our own, because the op with an addend has no fake implementation.
    """
    if not packed:
        raise AssertionError("passes/packing.py leaves no unpacked ipex::conv")
    op = torch.ops.mkldnn._convolution_pointwise
    tensors = [_channels_last(x), weight]
    constants = [padding, stride, dilation, groups]
    if other is None:
        constants += UNARY[unary].words
    else:
        tensors.insert(1, _channels_last(other))
        constants += ["add", 1.0, *UNARY[unary].words_after_add]
    if bias is None:
        constants.insert(0, None)
    else:
        tensors.append(ir.ExternKernel.require_contiguous(ir.ExternKernel.realize_input(bias)))
    kernel = ir.ExternKernelAlloc(
        _layout(x),
        tensors,
        constants,
        op_overload=op.default if other is None else op.binary,
    )
    return ir.TensorBox.create(kernel)


def _channels_last(x: Any) -> Any:
    return ir.ExternKernel.require_stride_order(
        ir.ExternKernel.realize_input(x), ir.NHWC_STRIDE_ORDER
    )


def _layout(x: Any) -> ir.FixedLayout:
    """The channels-last layout of the node that is being lowered."""
    shape = V.graph.current_node.meta["val"].shape
    size = [s.node.expr if isinstance(s, torch.SymInt) else s for s in shape]
    strides = ir.FlexibleLayout.stride_ordered(size, ir.NHWC_STRIDE_ORDER)
    return ir.FixedLayout(x.get_device(), x.get_dtype(), size, strides)


def register() -> None:
    """Add the lowerings of this family to Inductor's registry."""
    register_lowering(torch.ops.ipex.conv.default, type_promotion_kind=None)(_conv)
