"""`ipex::blocked` to a call of `templates/cpu/blocked.py`, or in C++ of the kernel itself."""

import math
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import register_lowering
from torch._inductor.virtualized import V

from ipex_inductor.templates.cpu import blocked, cpu_library

NAME = "ipex_blocked"  # in generated code


class OurCall(ir.ExternKernelOut):
    """A call of a kernel for CPUs: in generated Python of a template's `call`, imported once."""

    inputs: list[Any]
    imported = blocked.__name__

    def codegen(self, wrapper: Any) -> None:
        """Write the call, and once what it calls."""
        if V.graph.cpp_wrapper:
            self.codegen_comment(wrapper)
            if not hasattr(wrapper, "ipex_kernels"):
                inside = V.graph.aot_mode  # a package runs without Python
                wrapper.ipex_kernels = cpu_library.source(beside_torch=True) if inside else ""
                declared = cpu_library.declared(inside)
                wrapper.define_kernel("ipex", wrapper.ipex_kernels, None, False, declared)
            wrapper.writeline(f"/* {self.python_kernel_name} */ {self.in_cpp()}")
            return
        wrapper.add_import_once(f"from {self.imported} import call as {self.python_kernel_name}")
        super().codegen(wrapper)

    def in_cpp(self) -> str:
        """The statement."""
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


def address(x: Any) -> str:
    """Of a tensor's first element, in C++."""
    return f"ipex_address({x.codegen_reference()})"


def _blocked(
    x: Any,
    weight: Any,
    bias: Any,
    other: Any,
    columns: int,
    binary: str,
    unary: str,
    image: bool,
) -> Any:
    tensors = [without_gaps(x, image), without_gaps(weight)]
    tensors += [] if bias is None else [without_gaps(bias)]
    tensors += [] if other is None else [without_gaps(other, image)]
    words = columns, bias is not None, blocked.BINARY.index(binary), blocked.UNARY.index(unary)
    value = V.graph.current_node.meta["val"]
    layout = ir.FixedLayout(x.get_device(), x.get_dtype(), *expressions(value))
    return ir.TensorBox.create(OurCall(layout, tensors, words, python_kernel_name=NAME))


def without_gaps(x: Any, image: bool = False) -> Any:
    """`x` in memory, with the strides of its shape alone: a copy if it does not lie so.

    `image`: channels-last. (Of half its channels, an image has the order of strides, and gaps.)
    """
    x = ir.ExternKernel.realize_input(x)
    order = [3, 0, 2, 1] if image else [*reversed(range(len(x.get_size())))]
    strides = ir.FlexibleLayout.stride_ordered(x.get_size(), order)
    return ir.ExternKernel.require_exact_strides(x, strides)


def expressions(value: torch.Tensor) -> tuple[list[Any], list[Any]]:
    """Sizes and strides of a node's value, as Inductor's layouts take them."""
    sizes, strides = (
        [n.node.expr if isinstance(n, torch.SymInt) else n for n in numbers]
        for numbers in (value.shape, value.stride())
    )
    return sizes, strides


def why_not(packaged: bool = False) -> str | None:
    """Why generated code, or a package's, cannot call our kernels here, None when it can."""
    return cpu_library.why_not_in_cpp() if packaged else cpu_library.why_not()


def register() -> None:
    """Add the lowering to Inductor's registry."""
    register_lowering(torch.ops.ipex.blocked.default, type_promotion_kind=None)(_blocked)
