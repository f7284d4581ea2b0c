"""`ipex::conv` to oneDNN's convolution with a fused epilogue."""

from typing import Any

import torch
from torch._inductor import ir, mkldnn_ir
from torch._inductor.lowering import register_lowering
from torch._inductor.virtualized import V

from ipex_inductor.lowerings.onednn import OneDnnCall
from ipex_inductor.ops.epilogue import UNARY


def _conv(
    x: Any,
    weight: Any,
    bias: Any,
    other: Any,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
    binary: str,
    unary: str,
    scalars: list[float],
    packed: str,
) -> Any:
    """A call on channels-last tensors, so that no reorder stands between convolutions."""
    word = UNARY[unary]
    tensors = [_channels_last(x), weight if packed else _channels_last(weight)]
    epilogue: list[Any] = [word.word, scalars, word.algorithm]
    if transposed:
        op = torch.ops.mkldnn._convolution_transpose_pointwise.default
        constants = [padding, output_padding, stride, dilation, groups, *epilogue]
    elif other is None:
        op = torch.ops.mkldnn._convolution_pointwise.default
        constants = [padding, stride, dilation, groups, *epilogue]
    else:
        op = torch.ops.mkldnn._convolution_pointwise.binary
        tensors.insert(1, _channels_last(other))
        epilogue[0] = None if unary == "none" else word.word
        constants = [padding, stride, dilation, groups, binary, 1.0, *epilogue]
    if bias is None:
        constants.insert(0, None)
    else:
        tensors.append(ir.ExternKernel.require_contiguous(ir.ExternKernel.realize_input(bias)))
    if binary == "add" and _dies_here(V.graph.current_node):
        layout = ir.NoneLayout(device=x.get_device())
        # Out of place, torch copies the addend first: a quarter of ResNet-50 bf16 on AMX.
        sum_into = mkldnn_ir.ConvolutionBinaryInplace(layout, tensors, constants)
        addend: Any = sum_into.inputs[0]
        return ir.TensorBox.create(addend)
    return ir.TensorBox.create(OneDnnCall(op, _layout(x), tensors, constants))


def _dies_here(node: torch.fx.Node) -> bool:
    """Whether the result of `node` may take the place of its addend, which nothing reads later.

    Only for what a convolution wrote and others read: no view, and not the input of `node` itself.
    """
    other = node.args[3]
    assert isinstance(other, torch.fx.Node)
    own = torch.ops.ipex.conv.default
    others = [user for user in other.users if user is not node]
    return (
        other.target is own
        and other is not node.args[0]
        and all(user.target is own and user < node for user in others)
    )


def _order(dims: int) -> list[int]:
    """The stride order of channels-last in `dims` dimensions: NHWC_STRIDE_ORDER for four."""
    return [dims - 1, 0, *range(dims - 2, 0, -1)]


def _channels_last(x: Any) -> Any:
    order = _order(len(x.get_size()))
    return ir.ExternKernel.require_stride_order(ir.ExternKernel.realize_input(x), order)


def _layout(x: Any) -> ir.FixedLayout:
    """The channels-last layout of the node that is being lowered."""
    shape = V.graph.current_node.meta["val"].shape
    size = [s.node.expr if isinstance(s, torch.SymInt) else s for s in shape]
    strides = ir.FlexibleLayout.stride_ordered(size, _order(len(size)))
    return ir.FixedLayout(x.get_device(), x.get_dtype(), size, strides)


def register() -> None:
    """Add the lowerings of this family to Inductor's registry."""
    register_lowering(torch.ops.ipex.conv.default, type_promotion_kind=None)(_conv)
