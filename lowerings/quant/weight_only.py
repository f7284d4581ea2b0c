"""Lowering of linear layers on quantized weights: the CPU's kernel, or ops of torch."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.virtualized import V

from ipex_inductor.lowerings.common.registering import expand, register_by_name
from ipex_inductor.lowerings.gemm.blocked import OurCall, address, expressions, without_gaps
from ipex_inductor.lowerings.quant import weight_only_rows
from ipex_inductor.ops.common.defining import Arguments
from ipex_inductor.ops.quant.weight_only import Scheme, compute_reference
from ipex_inductor.target.x86_levels import compiled_ahead
from ipex_inductor.templates.cpu import weight_only

NAME = "ipex_weight_only_linear"  # in generated code
OPTIONAL = ("zeros", "order", "bias")


class WeightOnlyCall(OurCall):
    """Call of the kernel."""

    imported = weight_only.__name__

    def declare(self, wrapper: Any) -> None:
        """Write once per graph what calls in C++ depend on."""
        super().declare(wrapper)
        if not hasattr(wrapper, "ipex_weight_only"):
            wrapper.ipex_weight_only = True
            declarations = weight_only.declarations(inside=V.graph.aot_mode)
            wrapper.define_kernel(NAME, "", None, False, declarations)

    def in_cpp(self) -> str:
        """Return the C++ statements of the call."""
        x, weight, scales, *given = self.inputs
        *has, weight_dtype, group_size, compute = self.constant_args
        rest = iter(given)
        zeros, order, bias = (next(rest) if each else None for each in has)
        sizes = [*x.get_size()[:-1]], x.get_size()[-1], self.get_size()[-1]
        dtypes = x.get_dtype(), scales.get_dtype(), None if bias is None else bias.get_dtype()
        scheme = Scheme(weight_dtype, group_size, compute)
        numbers = weight_only.list_numbers((math.prod(sizes[0]), *sizes[1:]), dtypes, scheme)
        codegen = V.graph.wrapper_code.codegen_sizevar
        listed = ", ".join(str(codegen(number)) for number in numbers)
        tensors = (x, weight, scales, zeros, order, bias, self)
        pointers = ", ".join("nullptr" if t is None else address(t) for t in tensors)
        return (
            f"{{ const int64_t numbers[] = {{{listed}}}; "
            f"{weight_only.NAME}(numbers, {pointers}); }}"
        )


def _lower(call: Arguments) -> Any:
    device = call.x.get_device()
    # The pass took all layers that a kernel of a GPU computes. It does not expand the others, as
    # the weight preprocessing would keep the dequantized weight.
    if device.type != "cpu" or why_not(device) is not None:
        return expand(weight_only.LINEAR, _dequantize)
    given = [getattr(call, name) for name in OPTIONAL]
    tensors = [call.x, call.weight, call.scales, *(t for t in given if t is not None)]
    constants = (*(t is not None for t in given), call.weight_dtype, call.group_size, call.compute)
    value = V.graph.current_node.meta["val"]
    layout = ir.FixedLayout(call.x.get_device(), value.dtype, *expressions(value))
    inputs = [without_gaps(t) for t in tensors]
    return ir.TensorBox.create(WeightOnlyCall(layout, inputs, constants, python_kernel_name=NAME))


def _dequantize(call: Arguments) -> torch.Tensor:
    scheme = Scheme(call.weight_dtype, call.group_size, call.compute)
    tensors = call.x, call.weight, call.scales, call.zeros, call.order, call.bias
    return compute_reference(*tensors, scheme).contiguous()


def why_not(
    device: torch.device,
    values: Mapping[str, Any] | None = None,
    packaged: bool | None = None,
) -> str | None:
    """Return why no kernel computes a linear layer; None if one does.

    Args:
        device: device of the linear layer.
        values: arguments of the layer by name, with fake tensors; not needed for CPUs.
        packaged: whether the code is part of a package; None for the graph that is being lowered.
    """
    if device.type != "cpu":
        return weight_only_rows.why_not(device, values or {})
    is_elsewhere = V.graph.aot_mode if packaged is None else packaged
    # Asking for the library would load the one of another CPU.
    if is_elsewhere or compiled_ahead():
        return weight_only.why_not_in_cpp()
    return weight_only.why_not()


def register() -> None:
    """Add the lowering to Inductor's registry, and the kernel to the op."""
    register_by_name(weight_only.LINEAR, _lower)
    weight_only.register()
