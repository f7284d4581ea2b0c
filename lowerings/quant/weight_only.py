"""Lowering of linear layers on quantized weights: the CPU's kernel, elsewhere ops of torch."""

import math
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import process_subgraph_nodes
from torch._inductor.virtualized import V
from torch.fx.experimental.proxy_tensor import make_fx

from ipex_inductor import compat
from ipex_inductor.lowerings.common.registering import register_by_name
from ipex_inductor.lowerings.gemm.blocked import OurCall, address, expressions, without_gaps
from ipex_inductor.ops.common.defining import Arguments, name_arguments
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
    if why_not(call.x.get_device()) is not None:
        return _lower_in_torch_ops()
    given = [getattr(call, name) for name in OPTIONAL]
    tensors = [call.x, call.weight, call.scales, *(t for t in given if t is not None)]
    constants = (*(t is not None for t in given), call.weight_dtype, call.group_size, call.compute)
    value = V.graph.current_node.meta["val"]
    layout = ir.FixedLayout(call.x.get_device(), value.dtype, *expressions(value))
    inputs = [without_gaps(t) for t in tensors]
    return ir.TensorBox.create(WeightOnlyCall(layout, inputs, constants, python_kernel_name=NAME))


def _lower_in_torch_ops() -> Any:
    """Lower the present node as what its reference computes: dequantize, then multiply.

    Passes do not expand it, as the weight preprocessing would keep the dequantized weight.
    """
    node = V.graph.current_node
    nodes = node.all_input_nodes

    def compute(*values: torch.Tensor) -> torch.Tensor:
        by_node = dict(zip(nodes, values, strict=True))
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: by_node[n])
        call = name_arguments(weight_only.LINEAR, args, kwargs)
        scheme = Scheme(call.weight_dtype, call.group_size, call.compute)
        tensors = call.x, call.weight, call.scales, call.zeros, call.order, call.bias
        return compute_reference(*tensors, scheme).contiguous()

    values = [each.meta["val"] for each in nodes]
    with V.fake_mode:
        traced = make_fx(compute, decomposition_table=compat.decomposition_table())(*values)
    return process_subgraph_nodes(traced, [V.graph.env[each] for each in nodes])


def why_not(device: torch.device, packaged: bool | None = None) -> str | None:
    """Return why generated code cannot call the kernel for a device; None if it can.

    Args:
        device: device of the linear layer.
        packaged: whether the code is part of a package; None for the graph that is being lowered.
    """
    if device.type != "cpu":
        return f"no kernel on quantized weights for {device.type}: each call dequantizes the weight"
    is_elsewhere = V.graph.aot_mode if packaged is None else packaged
    # Asking for the library would load the one of another CPU.
    if is_elsewhere or compiled_ahead():
        return weight_only.why_not_in_cpp()
    return weight_only.why_not()


def register() -> None:
    """Add the lowering to Inductor's registry, and the kernel to the op."""
    register_by_name(weight_only.LINEAR, _lower)
    weight_only.register()
