"""Lowering of `ipex::kept_conv` to a cached oneDNN primitive, called from Python or C++."""

import json
from typing import Any

from torch._inductor import ir
from torch._inductor.virtualized import V

from ipex_inductor.lowerings.common.registering import register_by_name
from ipex_inductor.lowerings.gemm.blocked import OurCall, address, expressions, without_gaps
from ipex_inductor.ops.common.defining import Arguments
from ipex_inductor.ops.conv.cached_primitives import Geometry
from ipex_inductor.templates.cpu import cached_primitives

NAME = "ipex_kept"  # in generated code


class KeptCall(OurCall):
    """Call of a cached primitive; in C++ it uses the primitive that Python creates."""

    imported = cached_primitives.__name__

    def in_cpp(self) -> str:
        """Return the C++ statements of the call."""
        x, arranged, *rest = map(address, self.inputs)
        geometry = Geometry.of(self.constant_args[0])
        bias = rest[0] if geometry.biased else "nullptr"
        other = rest[-1] if geometry.added else "nullptr"
        pointers = ", ".join((x, arranged, bias, other, address(self)))
        constants = json.dumps(self.constant_args)
        return f'{{ static IpexKept kept{{R"({constants})"}}; kept({pointers}); }}'


def _lower_kept_conv(call: Arguments) -> Any:
    tensors = [without_gaps(call.x, image=True), without_gaps(call.arranged)]
    tensors += [] if call.bias is None else [without_gaps(call.bias)]
    tensors += [] if call.other is None else [without_gaps(call.other, image=True)]
    value = V.graph.current_node.meta["val"]
    layout = ir.FixedLayout(call.x.get_device(), call.x.get_dtype(), *expressions(value))
    constants = tuple(call.geometry), call.unary, tuple(call.scalars), call.tag
    return ir.TensorBox.create(KeptCall(layout, tensors, constants, python_kernel_name=NAME))


def why_not(packaged: bool = False) -> str | None:
    """Return why generated code cannot call cached primitives; None if it can.

    Args:
        packaged: whether the code is part of a package.
    """
    if packaged:
        return "packages and code for other CPUs cannot call them"
    return cached_primitives.why_not() or cached_primitives.why_no_more()


def register() -> None:
    """Add the lowering to Inductor's registry."""
    register_by_name(cached_primitives.KEPT_CONV, _lower_kept_conv)
