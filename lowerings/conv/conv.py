"""`ipex::conv` to oneDNN's convolution with a fused epilogue; on a GPU to cuDNN's or a product."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor import ir, mkldnn_ir
from torch._inductor.lowering import register_lowering
from torch._inductor.virtualized import V

from ipex_inductor.autotune.record import Problem
from ipex_inductor.lowerings.common import conv_templates, sycl
from ipex_inductor.lowerings.common.calls import (
    ACTIVATIONS,
    Call,
    LibraryCall,
    addmm_activation,
    always,
    is_channels_last,
    why_not,
)
from ipex_inductor.lowerings.common.onednn import OneDnnCall
from ipex_inductor.lowerings.conv import conv_many
from ipex_inductor.lowerings.gemm import persistent, software_pipelined, weight_stationary
from ipex_inductor.lowerings.problem.workload import named
from ipex_inductor.ops import epilogue
from ipex_inductor.ops.conv import reference
from ipex_inductor.ops.epilogue import UNARY
from ipex_inductor.ops.stem import image_of, rows_of
from ipex_inductor.templates.cpu.cached_primitives import KEPT_CONV
from ipex_inductor.templates.triton.software_pipelined import VECTOR

aten = torch.ops.aten


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
    tensors = [channels_last(x), weight if packed else channels_last(weight)]
    epilogue: list[Any] = [word.word, scalars, word.algorithm]
    if transposed:
        op = torch.ops.mkldnn._convolution_transpose_pointwise.default
        constants = [padding, output_padding, stride, dilation, groups, *epilogue]
    elif other is None:
        op = torch.ops.mkldnn._convolution_pointwise.default
        constants = [padding, stride, dilation, groups, *epilogue]
    else:
        op = torch.ops.mkldnn._convolution_pointwise.binary
        tensors.insert(1, channels_last(other))
        epilogue[0] = None if unary == "none" else word.word
        constants = [padding, stride, dilation, groups, binary, 1.0, *epilogue]
    if bias is None:
        constants.insert(0, None)
    else:
        tensors.append(contiguous(bias))
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
    ours = torch.ops.ipex
    own = (ours.conv.default, ours.blocked.default, ours.winograd.default, KEPT_CONV)
    others = [user for user in other.users if user is not node]
    return (
        other.target in own
        and other is not node.args[0]
        and all(user.target in own and user < node for user in others)
    )


def _order(dims: int) -> list[int]:
    """The stride order of channels-last in `dims` dimensions: NHWC_STRIDE_ORDER for four."""
    return [dims - 1, 0, *range(dims - 2, 0, -1)]


def channels_last(x: Any) -> Any:
    """`x` in memory, channels-last: a copy if it does not lie so."""
    order = _order(len(x.get_size()))
    return ir.ExternKernel.require_stride_order(ir.ExternKernel.realize_input(x), order)


def contiguous(x: Any) -> Any:
    """`x` in memory without gaps: a copy if it does not lie so."""
    return ir.ExternKernel.require_contiguous(ir.ExternKernel.realize_input(x))


def _layout(x: Any) -> ir.FixedLayout:
    """The channels-last layout of the node that is being lowered."""
    shape = V.graph.current_node.meta["val"].shape
    size = [s.node.expr if isinstance(s, torch.SymInt) else s for s in shape]
    strides = ir.FlexibleLayout.stride_ordered(size, _order(len(size)))
    return ir.FixedLayout(x.get_device(), x.get_dtype(), size, strides)


def _cudnn_conv_relu(
    x: Any,
    weight: Any,
    bias: Any,
    other: Any,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Any:
    """aten's op itself: through ours, each call would go through Python once more."""
    tensors = [channels_last(x), channels_last(weight)]
    if bias is not None:
        bias = ir.ExternKernel.require_contiguous(ir.ExternKernel.realize_input(bias))
    window = (bias, stride, padding, dilation, groups)
    if other is None:
        call = LibraryCall(aten.cudnn_convolution_relu.default, _layout(x), [*tensors, *window])
    else:
        addend = (channels_last(other), 1.0)
        add = aten.cudnn_convolution_add_relu.default
        call = LibraryCall(add, _layout(x), [*tensors, *addend, *window])
    return ir.TensorBox.create(call)


def _plain(*args: Any) -> Tensor:
    return reference(*args[:-1])


def _cudnn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    other: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
    *words: Any,
) -> Tensor:
    both = [*padding] * 2 if len(padding) == 1 else padding  # "valid" comes as one zero
    window = (stride, both, dilation, groups)
    result: Tensor = torch.ops.ipex.cudnn_conv_relu(x, weight, bias, other, *window)
    return result


def _product(
    x: Tensor, weight: Tensor, bias: Tensor | None, other: Tensor | None, *rest: Any
) -> Tensor:
    """A window of one pixel, where channels-last rows are those of a matrix: both are views."""
    *_, binary, unary, scalars, _ = rest
    product = image_of(rows_of(x) @ rows_of(weight).t(), len(x), *x.shape[2:])
    if bias is not None:
        product = product + bias.view(-1, 1, 1)
    return epilogue.apply(product, other, binary, unary, scalars)


def _product_activation(x: Tensor, weight: Tensor, bias: Tensor, other: None, *rest: Any) -> Tensor:
    rows = addmm_activation(rows_of(x), rows_of(weight), bias, rest[-3])
    return image_of(rows, len(x), *x.shape[2:])


def _why_not(problem: Problem) -> str | None:
    reason = why_not(problem)
    if reason is not None:
        return reason
    operands, given = named(problem), problem.constants
    if given["transposed"]:
        return "cuDNN has no epilogue of a transposed convolution"
    if len(operands["x"].shape) != 4:
        return "it is not over a plane"
    if given["groups"] != 1:
        return "it is grouped"
    images = (operands[name] for name in ("x", "weight", "other") if name in operands)
    if not all(map(is_channels_last, images)) or operands["x"].stride[1] != 1:
        return "its tensors are not channels-last"
    return None


def _why_not_cudnn(problem: Problem) -> str | None:
    obeyed = problem.settings
    if not obeyed.get("cudnn.enabled", True):
        return "cuDNN is switched off (torch.backends.cudnn)"
    if obeyed.get("cudnn.deterministic") or obeyed.get("deterministic"):
        return "its fused convolutions may differ from run to run"
    return _why_not(problem)


def _why_not_product(problem: Problem) -> str | None:
    if len(named(problem)["x"].shape) == 4 and not conv_templates.is_product(problem):
        return "its window is more than one pixel"
    return _why_not(problem)


def _why_not_activation(problem: Problem) -> str | None:
    no_bias = "cuBLASLt's epilogue is behind a bias" if "bias" not in named(problem) else None
    return no_bias or _why_not_product(problem)


def _filled(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    """Channels of zeros behind those of the weight, so that pixels are whole vectors."""
    return F.pad(weight, (0, 0, 0, 0, 0, -weight.shape[1] % (VECTOR // weight.itemsize)))


def _on_filled(filled: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    more = filled.shape[1] - weight.shape[1]
    return _plain(F.pad(x, (0, 0, 0, 0, 0, more)), filled, *rest)


def _why_not_filled(problem: Problem) -> str | None:
    if reason := _why_not(problem):
        return reason
    x = named(problem)["x"]
    channels, vector = int(x.shape[1]), VECTOR // getattr(torch, x.dtype).itemsize
    if channels <= vector // 2:
        return "of so few a stem's template is faster (benchmarks/few_channels.py)"
    return None if channels % vector else "its pixels are whole vectors as they are"


# What computes it on a GPU; the first is what Inductor does.
CALLS = (
    Call("aten.convolution", _plain, always),
    Call("cudnn.convolution_relu", _cudnn, _why_not_cudnn, frozenset({("none", "relu")})),
    Call("cudnn.convolution_add_relu", _cudnn, _why_not_cudnn, frozenset({("add", "relu")})),
    Call("aten.mm", _product, _why_not_product),
    Call("cublaslt.addmm_activation", _product_activation, _why_not_activation, ACTIVATIONS),
    Call("aten.convolution_padded", _on_filled, _why_not_filled, arrange=_filled),
    *conv_templates.CALLS,
    *conv_many.CALLS,
    *weight_stationary.CONV_CALLS,
    *persistent.CONV_CALLS,
    *software_pipelined.CONV_CALLS,
    *sycl.CONV_CALLS,
)


def register() -> None:
    """Add the lowerings of this family to Inductor's registry."""
    register_lowering(torch.ops.ipex.conv.default, type_promotion_kind=None)(_conv)
    cudnn = torch.ops.ipex.cudnn_conv_relu.default
    register_lowering(cudnn, type_promotion_kind=None)(_cudnn_conv_relu)
