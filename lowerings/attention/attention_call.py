"""Calls of the CPU library's attention kernels in Inductor's code, Python and C++."""

from collections.abc import Sequence
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.virtualized import V

from ipex_inductor.lowerings.gemm.blocked import OurCall, address, expressions, without_gaps
from ipex_inductor.templates.cpu.attention_call import lies_in_rows, sizes_of


class AttentionCall(OurCall):
    """Call of an attention kernel; in C++ it reads tensors by their strides."""

    def write_call(self, kernel: str, tensors: Sequence[Any], causal: bool, scale: float) -> str:
        """Return the C++ statements of the call.

        Args:
            kernel: name of the kernel.
            tensors: query, key, value, mask or None, and what else the kernel reads.
            causal: whether query i attends to the keys up to i.
            scale: factor of the scores.
        """
        q, k, v, mask, *_ = tensors
        keys = k.get_size()[2]
        scores = [*q.get_size()[:3], keys]
        steps = [0] * 4 if mask is None else broadcast_strides(mask, scores)
        strides = [*(x.get_stride() for x in (q, k, v, self)), steps]
        sizes = ", ".join(map(str, sizes_of(q.get_size(), keys, causal, strides)))
        pointers = ", ".join("nullptr" if x is None else address(x) for x in (*tensors, self))
        return f"{{ const int64_t sizes[] = {{{sizes}}}; {kernel}(sizes, {scale!r}, {pointers}); }}"


def create_call(
    kind: type[AttentionCall], name: str, tensors: Sequence[Any], constants: tuple[Any, ...]
) -> Any:
    """Return the result of a call, with the strides that the graph's node was traced with.

    Args:
        kind: class of the call.
        name: name of the call in generated code.
        tensors: query, key, value, mask or None, and what else the kernel reads.
        constants: further arguments of the call.
    """
    node: Any = V.graph.current_node
    if V.graph.cpp_wrapper:  # In Python the call copies tensors that are not in rows.
        rows = zip(tensors[:3], node.args[:3], strict=True)
        others = (None if t is None else without_gaps(t) for t in tensors[3:])
        tensors = [*(_realize_rows(x, n.meta["val"]) for x, n in rows), *others]
    inputs = [ir.ExternKernel.realize_input(t) for t in tensors if t is not None]
    q = tensors[0]
    layout = ir.FixedLayout(q.get_device(), q.get_dtype(), *expressions(node.meta["val"]))
    return ir.TensorBox.create(kind(layout, inputs, constants, python_kernel_name=name))


def _realize_rows(x: Any, value: torch.Tensor) -> Any:
    """Return `x` with the strides that it was traced with, or a dense copy."""
    if not lies_in_rows(value) or 0 in value.stride():
        return without_gaps(x)
    x = ir.ExternKernel.realize_input(x)
    return ir.ExternKernel.require_exact_strides(x, value.stride())


def broadcast_strides(mask: Any, scores: list[Any]) -> list[Any]:
    """Return the strides of `mask` broadcast to the scores."""
    missing = len(scores) - len(mask.get_size())
    sizes, strides = [1] * missing + [*mask.get_size()], [0] * missing + [*mask.get_stride()]
    return [0 if size == 1 else stride for size, stride in zip(sizes, strides, strict=True)]
