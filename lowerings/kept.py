"""`ipex::kept_conv` to a call of `templates/kept.py`."""

from typing import Any

from torch._inductor import config, ir
from torch._inductor.lowering import register_lowering
from torch._inductor.virtualized import V

from ipex_inductor.lowerings.blocked import OurCall, expressions, without_gaps
from ipex_inductor.templates import kept

NAME = "ipex_kept"  # in generated code


class KeptCall(OurCall):
    """In generated Python alone."""

    imported = kept.__name__


def _kept(
    x: Any,
    arranged: Any,
    bias: Any,
    other: Any,
    geometry: list[int],
    unary: str,
    scalars: list[float],
    tag: int,
) -> Any:
    tensors = [without_gaps(x, image=True), without_gaps(arranged)]
    tensors += [] if bias is None else [without_gaps(bias)]
    tensors += [] if other is None else [without_gaps(other, image=True)]
    value = V.graph.current_node.meta["val"]
    layout = ir.FixedLayout(x.get_device(), x.get_dtype(), *expressions(value))
    constants = tuple(geometry), unary, tuple(scalars), tag
    return ir.TensorBox.create(KeptCall(layout, tensors, constants, python_kernel_name=NAME))


def why_not(packaged: bool = False) -> str | None:
    """Why generated code, or a package's, cannot call them, None when it can."""
    if packaged or config.cpp_wrapper:
        return "neither code in C++ nor for other CPUs calls them"
    return kept.why_not() or kept.why_no_more()


def register() -> None:
    """Add the lowering to Inductor's registry."""
    register_lowering(kept.KEPT_CONV, type_promotion_kind=None)(_kept)
