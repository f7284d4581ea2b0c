"""Lowering of `ipex::short_attention` to a call of our kernel, from Python or C++."""

from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import register_lowering
from torch._inductor.virtualized import V

from ipex_inductor.lowerings.gemm.blocked import OurCall, address, expressions, without_gaps
from ipex_inductor.templates.cpu import short_attention
from ipex_inductor.templates.cpu.cpu_library import NAMES

NAME = "ipex_short_attention"  # in generated code


class AttentionCall(OurCall):
    """Call of the kernel; in C++ it reads tensors by their strides, as the template does."""

    imported = short_attention.__name__

    def in_cpp(self) -> str:
        """Return the C++ statements of the call."""
        q, k, v, *masks = self.inputs
        causal, scale = self.constant_args
        keys = k.get_size()[2]
        steps = broadcast_strides(masks[0], [*q.get_size()[:3], keys]) if masks else [0] * 4
        strides = [*(x.get_stride() for x in (q, k, v, self)), steps]
        sizes = short_attention.sizes_of(q.get_size(), keys, causal, strides)
        mask = address(masks[0]) if masks else "nullptr"
        pointers = ", ".join((address(q), address(k), address(v), mask, address(self)))
        name = f"attention_{NAMES[self.get_dtype()]}"
        written = ", ".join(map(str, sizes))
        return f"{{ const int64_t sizes[] = {{{written}}}; {name}(sizes, {scale!r}, {pointers}); }}"


def _short_attention(q: Any, k: Any, v: Any, mask: Any, causal: bool, scale: float) -> Any:
    node: Any = V.graph.current_node
    if V.graph.cpp_wrapper:  # In Python the call copies tensors that are not in rows.
        q, k, v = (
            realize_rows(x, n.meta["val"]) for x, n in zip((q, k, v), node.args[:3], strict=True)
        )
        mask = mask and without_gaps(mask)
    tensors = [ir.ExternKernel.realize_input(t) for t in (q, k, v, mask) if t is not None]
    layout = ir.FixedLayout(q.get_device(), q.get_dtype(), *expressions(node.meta["val"]))
    call = AttentionCall(layout, tensors, (causal, scale), python_kernel_name=NAME)
    return ir.TensorBox.create(call)


def realize_rows(x: Any, value: torch.Tensor) -> Any:
    """Return `x` with the strides that it was traced with, or a dense copy."""
    if not short_attention.lies_in_rows(value) or 0 in value.stride():
        return without_gaps(x)
    x = ir.ExternKernel.realize_input(x)
    return ir.ExternKernel.require_exact_strides(x, value.stride())


def broadcast_strides(mask: Any, scores: list[Any]) -> list[Any]:
    """Return the strides of `mask` broadcast to the scores."""
    missing = len(scores) - len(mask.get_size())
    sizes, strides = [1] * missing + [*mask.get_size()], [0] * missing + [*mask.get_stride()]
    return [0 if size == 1 else stride for size, stride in zip(sizes, strides, strict=True)]


def register() -> None:
    """Add the lowering to Inductor's registry."""
    op = torch.ops.ipex.short_attention.default
    register_lowering(op, type_promotion_kind=None)(_short_attention)
