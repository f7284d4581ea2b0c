"""Lowering of `ipex::linear` to oneDNN's linear with a fused epilogue; on a GPU to cuBLASLt's."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor import ir

from ipex_inductor.autotune.record import Problem
from ipex_inductor.lowerings.common import sycl
from ipex_inductor.lowerings.common.calls import (
    ACTIVATIONS,
    Call,
    addmm_activation,
    always,
    why_not,
)
from ipex_inductor.lowerings.common.onednn import OneDnnCall
from ipex_inductor.lowerings.common.registering import register_by_name
from ipex_inductor.lowerings.gemm import persistent, skinny, software_pipelined, weight_stationary
from ipex_inductor.lowerings.problem.workload import operands_by_name
from ipex_inductor.ops.common import epilogue
from ipex_inductor.ops.common.defining import Arguments
from ipex_inductor.ops.common.epilogue import UNARY
from ipex_inductor.ops.gemm.linear import LinearArgs, reference
from ipex_inductor.templates.triton.software_pipelined import VECTOR


def _linear(call: Arguments) -> Any:
    """Lower to a oneDNN call on a plain weight (training) or on a packed one.

    A packed weight has no strides to require.
    """
    op, activation = torch.ops.mkldnn._linear_pointwise, UNARY[call.unary]
    tensors = [
        _contiguous(call.x),
        call.weight if call.packed else _contiguous(call.weight),
    ]
    constants: list[Any] = [activation.onednn_name, call.scalars, activation.algorithm]
    if call.other is not None:
        tensors.insert(1, _contiguous(call.other))
        constants = [call.binary]
    if call.bias is None:
        constants.insert(0, None)
    else:
        tensors.append(_contiguous(call.bias))  # oneDNN ignores the bias's stride.
    size = [*call.x.get_size()[:-1], call.weight.get_size()[0]]
    layout = ir.FixedLayout(call.x.get_device(), call.x.get_dtype(), size)
    overload = op.default if call.other is None else op.binary
    return ir.TensorBox.create(OneDnnCall(overload, layout, tensors, constants))


def _contiguous(x: Any) -> Any:
    return ir.ExternKernel.require_contiguous(ir.ExternKernel.realize_input(x))


def _addmm_activation(*args: Any) -> Tensor:
    call = LinearArgs(*args)
    rows = call.x.reshape(-1, call.x.shape[-1])
    result = addmm_activation(rows, call.weight, call.bias, call.unary)
    return result.view(*call.x.shape[:-1], -1)


def _why_not_activation(problem: Problem) -> str | None:
    bias = operands_by_name(problem).get("bias")
    if bias is None:
        return "cuBLASLt's epilogue needs a bias"
    if bias.stride != (1,):
        return "its bias is not contiguous"
    return why_not(problem)


def _pad_weight(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    """Return the weight with N zero-padded, so that rows of the result are whole vectors."""
    return F.pad(weight, (0, 0, 0, -len(weight) % (VECTOR // weight.itemsize)))


def _run_padded(
    padded: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any
) -> Tensor:
    columns = len(weight)
    padded_bias = bias if bias is None else F.pad(bias, (0, len(padded) - columns))
    product = F.linear(x, padded, padded_bias)[..., :columns].contiguous()
    return epilogue.apply(product, *rest[:-1])


def _why_not_padded(problem: Problem) -> str | None:
    if reason := why_not(problem):
        return reason
    return None if software_pipelined.is_uneven(problem) else "its rows are already whole vectors"


# Calls that compute the op on a GPU. The first is Inductor's default.
CALLS = (
    Call("aten.addmm", reference, always),
    Call("cublaslt.addmm_activation", _addmm_activation, _why_not_activation, ACTIVATIONS),
    Call("aten.addmm_padded", _run_padded, _why_not_padded, arrange=_pad_weight),
    *skinny.CALLS,
    *weight_stationary.LINEAR_CALLS,
    *persistent.LINEAR_CALLS,
    *software_pipelined.LINEAR_CALLS,
    *sycl.LINEAR_CALLS,
)


def register() -> None:
    """Add the lowerings of linear layers to Inductor's registry."""
    register_by_name(torch.ops.ipex.linear.default, _linear)
