"""Lowering of `ipex::winograd` to `templates/cpu/winograd.py`, or in C++ to its kernel."""

from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import register_lowering
from torch._inductor.virtualized import V

from ipex_inductor.lowerings.gemm.blocked import OurCall, address, expressions, without_gaps
from ipex_inductor.templates.cpu import cpu_library, winograd
from ipex_inductor.templates.cpu.blocked import UNARY

NAME = "ipex_winograd"  # in generated code


class WinogradCall(OurCall):
    """Call of the Winograd kernel; in C++ it does what the template does in Python."""

    imported = winograd.__name__

    def in_cpp(self) -> str:
        """Return the C++ statements of the call."""
        x, weight, *rest = self.inputs
        padding, biased, added, unary = self.constant_args
        plane = winograd.plane_of(x.get_size(), self.get_size(), padding)
        bias = address(rest[0]) if biased else "nullptr"
        other = address(rest[-1]) if added else "nullptr"
        pointers = ", ".join((address(x), address(weight), bias, other, address(self)))
        sizes = f"const int64_t plane[] = {{{', '.join(map(str, plane))}}};"
        name = f"winograd_{cpu_library.NAMES[self.get_dtype()]}"
        return f"{{ {sizes} {name}(plane, {pointers}, {unary}); }}"


def _winograd(
    x: Any, weight: Any, bias: Any, other: Any, padding: list[int], binary: str, unary: str
) -> Any:
    tensors = [without_gaps(x, image=True), without_gaps(weight)]
    tensors += [] if bias is None else [without_gaps(bias)]
    tensors += [] if other is None else [without_gaps(other, image=True)]
    epilogue_indices = winograd.BINARY.index(binary), UNARY.index(unary)
    constants = tuple(padding), bias is not None, *epilogue_indices
    value = V.graph.current_node.meta["val"]
    layout = ir.FixedLayout(x.get_device(), x.get_dtype(), *expressions(value))
    return ir.TensorBox.create(WinogradCall(layout, tensors, constants, python_kernel_name=NAME))


def register() -> None:
    """Add the lowering to Inductor's registry."""
    register_lowering(torch.ops.ipex.winograd.default, type_promotion_kind=None)(_winograd)
