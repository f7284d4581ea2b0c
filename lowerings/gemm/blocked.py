"""Lowering of `ipex::blocked` to `templates/cpu/blocked.py`, or in C++ to its kernel."""

import math
from typing import Any

import torch
from torch._inductor import config, ir
from torch._inductor.virtualized import V

from ipex_inductor.lowerings.common.registering import register_by_name
from ipex_inductor.ops.common.defining import Arguments
from ipex_inductor.templates.cpu import blocked, cpu_library, int8, weight_only

NAME = "ipex_blocked"  # in generated code


class OurCall(ir.ExternKernelOut):
    """Call of a CPU kernel; generated Python imports a template's `call` once."""

    inputs: list[Any]
    imported = blocked.__name__
    function = "call"  # of that module

    def codegen(self, wrapper: Any) -> None:
        """Write the call, and once per graph what it depends on."""
        if V.graph.cpp_wrapper:
            self.codegen_comment(wrapper)
            self.declare(wrapper)
            call = f"/* {self.python_kernel_name} */ {self.in_cpp()}"
            if config.cpp.enable_kernel_profile:  # as Inductor records its own kernels
                name = self.python_kernel_name
                # The node of the graph tells calls of one kernel apart.
                title = f"{name} [{self.origin_node}]" if self.origin_node else name
                record = f'RAIIAtenRecordFunctionHandle record_{name}("{title}", nullptr);'
                wrapper.writelines(["{", record, call, "}"])
            else:
                wrapper.writeline(call)
            return
        name = f"{self.function} as {self.python_kernel_name}"
        wrapper.add_import_once(f"from {self.imported} import {name}")
        super().codegen(wrapper)

    def declare(self, wrapper: Any) -> None:
        """Write once per graph what calls in C++ depend on."""
        if not hasattr(wrapper, "ipex_kernels"):
            packaged = V.graph.aot_mode  # A package runs without Python.
            wrapper.ipex_kernels = _package_source() if packaged else ""
            declarations = cpu_library.declarations(packaged)
            wrapper.define_kernel("ipex", wrapper.ipex_kernels, None, False, declarations)

    def in_cpp(self) -> str:
        """Return the C++ statement of the call."""
        x, weight, *rest = (address(i) for i in self.inputs)
        columns, biased, binary, unary = self.constant_args
        rows = V.graph.wrapper_code.codegen_sizevar(math.prod(self.get_size()) // columns)
        bias, other = rest[0] if biased else "nullptr", rest[-1] if binary else "nullptr"
        _, count, _, paired = self.inputs[1].get_size()
        depth = count * paired
        pointers = ", ".join((x, weight, bias, other, address(self)))
        name = f"product_{cpu_library.PRODUCTS[self.get_dtype()]}"
        sizes = f"{rows}, {depth}, {columns}, {self.inputs[1].get_size()[2]}"
        return f"{name}({sizes}, {pointers}, {binary}, {unary});"


def _package_source() -> str:
    """Return the C++ of the kernels that the code of a package contains."""
    graph: Any = V.graph.module.graph
    targets = {node.target for node in graph.nodes}
    more = "" if targets.isdisjoint(int8.KERNELS) else int8.definitions()
    more += weight_only.definitions() if weight_only.LINEAR in targets else ""
    return cpu_library.source(beside_torch=True, more=more)


def address(x: Any) -> str:
    """Return the C++ expression of the address of a tensor's first element."""
    return f"ipex_address({x.codegen_reference()})"


def _lower_blocked(call: Arguments) -> Any:
    tensors = [without_gaps(call.x, call.image), without_gaps(call.weight)]
    tensors += [] if call.bias is None else [without_gaps(call.bias)]
    tensors += [] if call.other is None else [without_gaps(call.other, call.image)]
    words = blocked.BINARY.index(call.binary), blocked.UNARY.index(call.unary)
    constants = call.columns, call.bias is not None, *words
    value = V.graph.current_node.meta["val"]
    layout = ir.FixedLayout(call.x.get_device(), call.x.get_dtype(), *expressions(value))
    return ir.TensorBox.create(OurCall(layout, tensors, constants, python_kernel_name=NAME))


def without_gaps(x: Any, image: bool = False) -> Any:
    """Return `x` in memory with the dense strides of its shape, copied if it has others.

    Half the channels of an activation have the right stride order, but gaps.

    Args:
        x: node to realize.
        image: whether the strides are channels-last.
    """
    x = ir.ExternKernel.realize_input(x)
    dims = len(x.get_size())
    order = [dims - 1, 0, *reversed(range(1, dims - 1))] if image else [*reversed(range(dims))]
    strides = ir.FlexibleLayout.stride_ordered(x.get_size(), order)
    return ir.ExternKernel.require_exact_strides(x, strides)


def expressions(value: torch.Tensor) -> tuple[list[Any], list[Any]]:
    """Return the sizes and strides of a node's value, as Inductor's layouts take them."""
    sizes, strides = (
        [n.node.expr if isinstance(n, torch.SymInt) else n for n in numbers]
        for numbers in (value.shape, value.stride())
    )
    return sizes, strides


def why_not(packaged: bool = False) -> str | None:
    """Return why generated code cannot call our CPU kernels here; None if it can.

    Args:
        packaged: whether the code is part of a package.
    """
    return cpu_library.why_not_in_cpp() if packaged else cpu_library.why_not()


def register() -> None:
    """Add the lowering to Inductor's registry."""
    register_by_name(torch.ops.ipex.blocked.default, _lower_blocked)
