"""Lowering of `ipex::conv` to oneDNN with a fused epilogue; on a GPU to cuDNN or a GEMM."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor import ir, mkldnn_ir
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
from ipex_inductor.lowerings.common.registering import register_by_name
from ipex_inductor.lowerings.conv import conv_many
from ipex_inductor.lowerings.gemm import persistent, software_pipelined, weight_stationary
from ipex_inductor.lowerings.problem.workload import operands_by_name
from ipex_inductor.ops.common import epilogue
from ipex_inductor.ops.common.defining import Arguments
from ipex_inductor.ops.common.epilogue import UNARY
from ipex_inductor.ops.conv.conv import ConvArgs, reference
from ipex_inductor.ops.conv.geometry import image_of, rows_of
from ipex_inductor.templates.cpu.cached_primitives import KEPT_CONV
from ipex_inductor.templates.triton.software_pipelined import VECTOR

aten = torch.ops.aten


def _conv(call: Arguments) -> Any:
    """Lower to a oneDNN call on channels-last tensors: convolutions in a row need no reorder."""
    activation = UNARY[call.unary]
    weight = call.weight if call.packed else channels_last(call.weight)
    tensors = [channels_last(call.x), weight]
    window = [call.padding, call.stride, call.dilation, call.groups]
    epilogue: list[Any] = [activation.onednn_name, call.scalars, activation.algorithm]
    if call.transposed:
        op = torch.ops.mkldnn._convolution_transpose_pointwise.default
        constants = [call.padding, call.output_padding, *window[1:], *epilogue]
    elif call.other is None:
        op = torch.ops.mkldnn._convolution_pointwise.default
        constants = [*window, *epilogue]
    else:
        op = torch.ops.mkldnn._convolution_pointwise.binary
        tensors.insert(1, channels_last(call.other))
        epilogue[0] = None if call.unary == "none" else activation.onednn_name
        constants = [*window, call.binary, 1.0, *epilogue]
    if call.bias is None:
        constants.insert(0, None)
    else:
        tensors.append(contiguous(call.bias))
    if call.binary == "add" and _dies_here(V.graph.current_node):
        layout = ir.NoneLayout(device=call.x.get_device())
        # Out of place, torch copies the addend first: a quarter of ResNet-50 bf16 on AMX.
        sum_into = mkldnn_ir.ConvolutionBinaryInplace(layout, tensors, constants)
        addend: Any = sum_into.inputs[0]
        return ir.TensorBox.create(addend)
    return ir.TensorBox.create(OneDnnCall(op, _layout(call.x), tensors, constants))


def _dies_here(node: torch.fx.Node) -> bool:
    """Return whether the result of `node` may overwrite its addend, which nothing reads later.

    This is allowed only for an addend that a convolution wrote and that only earlier nodes read. A
    view and the input of `node` itself are excluded.
    """
    addend = node.args[3]
    assert isinstance(addend, torch.fx.Node)
    ours = torch.ops.ipex
    conv_ops = (ours.conv.default, ours.blocked.default, ours.winograd.default, KEPT_CONV)
    other_users = [user for user in addend.users if user is not node]
    return (
        addend.target in conv_ops
        and addend is not node.args[0]
        and all(user.target in conv_ops and user < node for user in other_users)
    )


def _order(dims: int) -> list[int]:
    """Return the stride order of channels-last in `dims` dimensions: NHWC_STRIDE_ORDER for four."""
    return [dims - 1, 0, *range(dims - 2, 0, -1)]


def channels_last(x: Any) -> Any:
    """Return `x` in memory in channels-last order, copied if its strides differ."""
    order = _order(len(x.get_size()))
    return ir.ExternKernel.require_stride_order(ir.ExternKernel.realize_input(x), order)


def contiguous(x: Any) -> Any:
    """Return `x` in memory without gaps, copied if it is not contiguous."""
    return ir.ExternKernel.require_contiguous(ir.ExternKernel.realize_input(x))


def _layout(x: Any) -> ir.FixedLayout:
    """Return the channels-last layout of the result of the node that is being lowered."""
    shape = V.graph.current_node.meta["val"].shape
    size = [s.node.expr if isinstance(s, torch.SymInt) else s for s in shape]
    strides = ir.FlexibleLayout.stride_ordered(size, _order(len(size)))
    return ir.FixedLayout(x.get_device(), x.get_dtype(), size, strides)


def _cudnn_conv_relu(call: Arguments) -> Any:
    """Lower to aten's cuDNN op itself: a call of our op would go through Python once more."""
    tensors = [channels_last(call.x), channels_last(call.weight)]
    bias, layout = call.bias, _layout(call.x)
    if bias is not None:
        bias = ir.ExternKernel.require_contiguous(ir.ExternKernel.realize_input(bias))
    geometry = (bias, call.stride, call.padding, call.dilation, call.groups)
    if call.other is None:
        conv = LibraryCall(aten.cudnn_convolution_relu.default, layout, [*tensors, *geometry])
    else:
        addend = (channels_last(call.other), 1.0)
        add = aten.cudnn_convolution_add_relu.default
        conv = LibraryCall(add, layout, [*tensors, *addend, *geometry])
    return ir.TensorBox.create(conv)


def _cudnn(*args: Any) -> Tensor:
    call = ConvArgs(*args)
    padding = [*call.padding] * 2 if len(call.padding) == 1 else call.padding  # "valid" is one zero
    geometry = (call.stride, padding, call.dilation, call.groups)
    operands = call.x, call.weight, call.bias, call.other
    result: Tensor = torch.ops.ipex.cudnn_conv_relu(*operands, *geometry)
    return result


def _run_gemm(*args: Any) -> Tensor:
    """Compute a 1x1 convolution as a GEMM on the rows of channels-last tensors, which are views."""
    call = ConvArgs(*args)
    product = rows_of(call.x) @ rows_of(call.weight).t()
    product = image_of(product, len(call.x), *call.x.shape[2:])
    if call.bias is not None:
        product = product + call.bias.view(-1, 1, 1)
    return epilogue.apply(product, call.other, *call.epilogue())


def _run_gemm_activation(*args: Any) -> Tensor:
    call = ConvArgs(*args)
    rows = addmm_activation(rows_of(call.x), rows_of(call.weight), call.bias, call.unary)
    return image_of(rows, len(call.x), *call.x.shape[2:])


def _why_not(problem: Problem) -> str | None:
    reason = why_not(problem)
    if reason is not None:
        return reason
    operands, constants = operands_by_name(problem), problem.constants
    if constants["transposed"]:
        return "cuDNN has no epilogue of a transposed convolution"
    if len(operands["x"].shape) != 4:
        return "it is not over a plane"
    if constants["groups"] != 1:
        return "it is grouped"
    tensors = (operands[name] for name in ("x", "weight", "other") if name in operands)
    if not all(map(is_channels_last, tensors)) or operands["x"].stride[1] != 1:
        return "its tensors are not channels-last"
    return None


def _why_not_cudnn(problem: Problem) -> str | None:
    settings = problem.settings
    if not settings.get("cudnn.enabled", True):
        return "cuDNN is switched off (torch.backends.cudnn)"
    if settings.get("cudnn.deterministic") or settings.get("deterministic"):
        return "its fused convolutions may differ from run to run"
    return _why_not(problem)


def _why_not_gemm(problem: Problem) -> str | None:
    if len(operands_by_name(problem)["x"].shape) == 4 and not conv_templates.is_product(problem):
        return "it is no 1x1 convolution with stride 1 and without padding"
    return _why_not(problem)


def _why_not_activation(problem: Problem) -> str | None:
    no_bias = (
        "cuBLASLt's epilogue needs a bias" if "bias" not in operands_by_name(problem) else None
    )
    return no_bias or _why_not_gemm(problem)


def _pad_channels(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    """Return the weight with its channels zero-padded, so that pixels are whole vectors."""
    return F.pad(weight, (0, 0, 0, 0, 0, -weight.shape[1] % (VECTOR // weight.itemsize)))


def _run_padded(filled: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    missing = filled.shape[1] - weight.shape[1]
    return reference(F.pad(x, (0, 0, 0, 0, 0, missing)), filled, *rest)


def _why_not_padded(problem: Problem) -> str | None:
    if reason := _why_not(problem):
        return reason
    x = operands_by_name(problem)["x"]
    channels, vector = int(x.shape[1]), VECTOR // getattr(torch, x.dtype).itemsize
    if channels <= vector // 2:
        return (
            "the small-channel template is faster for so few channels "
            "(benchmarks/studies/few_channels.py)"
        )
    return None if channels % vector else "its pixels are already whole vectors"


# Calls that compute the op on a GPU. The first is Inductor's default.
CALLS = (
    Call("aten.convolution", reference, always),
    Call("cudnn.convolution_relu", _cudnn, _why_not_cudnn, frozenset({("none", "relu")})),
    Call("cudnn.convolution_add_relu", _cudnn, _why_not_cudnn, frozenset({("add", "relu")})),
    Call("aten.mm", _run_gemm, _why_not_gemm),
    Call("cublaslt.addmm_activation", _run_gemm_activation, _why_not_activation, ACTIVATIONS),
    Call("aten.convolution_padded", _run_padded, _why_not_padded, arrange=_pad_channels),
    *conv_templates.CALLS,
    *conv_many.CALLS,
    *weight_stationary.CONV_CALLS,
    *persistent.CONV_CALLS,
    *software_pipelined.CONV_CALLS,
    *sycl.CONV_CALLS,
)


def register() -> None:
    """Add the lowerings of convolutions to Inductor's registry."""
    register_by_name(torch.ops.ipex.conv.default, _conv)
    cudnn = torch.ops.ipex.cudnn_conv_relu.default
    register_by_name(cudnn, _cudnn_conv_relu)
