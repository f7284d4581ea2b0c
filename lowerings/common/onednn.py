"""Calls of oneDNN's fused ops, as generated Python or C++."""

from collections.abc import Sequence
from typing import Any

import torch
from torch._inductor import ir, mkldnn_ir

_ops: Any = torch.ops.mkldnn
SHIMS = {  # names of the C++ functions after `aoti_torch_cpu_`
    _ops._convolution_pointwise.default: "mkldnn__convolution_pointwise",
    _ops._convolution_pointwise.binary: "mkldnn__convolution_pointwise_binary",
    _ops._convolution_transpose_pointwise.default: "mkldnn__convolution_transpose_pointwise",
    _ops._linear_pointwise.default: "_linear_pointwise",
    _ops._linear_pointwise.binary: "_linear_pointwise_binary",
}


class OneDnnCall(mkldnn_ir.ConvolutionUnary):
    """Extern call of a oneDNN op; the ops with an addend have no fake implementation.

    Torch's base class brings the header that declares the functions.
    """

    def __init__(
        self, op: Any, layout: ir.Layout, tensors: Sequence[Any], constants: Sequence[Any]
    ) -> None:
        self.device_type = "cpu"
        shim = f"aoti_torch_cpu_{SHIMS[op]}"
        ir.ExternKernelAlloc.__init__(
            self, layout, tensors, tuple(constants), op_overload=op, cpp_kernel_name=shim
        )
