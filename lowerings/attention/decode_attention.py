"""Lowering of `ipex::decode_attention` to a call of our kernel, from Python or C++."""

from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import register_lowering
from torch._inductor.virtualized import V

from ipex_inductor.lowerings.attention.short_attention import broadcast_strides, realize_rows
from ipex_inductor.lowerings.gemm.blocked import OurCall, address, expressions, without_gaps
from ipex_inductor.templates.cpu import decode_attention, short_attention
from ipex_inductor.templates.cpu.cpu_library import PRODUCTS

NAME = "ipex_decode_attention"  # in generated code


class DecodeCall(OurCall):
    """Call of the kernel; in C++ it reads tensors by their strides, as the template does."""

    imported = decode_attention.__name__

    def in_cpp(self) -> str:
        """Return the C++ statements of the call."""
        q, k, v, *rest = self.inputs
        has_mask, has_table, scale = self.constant_args
        keys = k.get_size()[2]
        steps = broadcast_strides(rest[0], [*q.get_size()[:3], keys]) if has_mask else [0] * 4
        strides = [*(x.get_stride() for x in (q, k, v, self)), steps]
        sizes = short_attention.sizes_of(q.get_size(), keys, False, strides)
        mask = address(rest[0]) if has_mask else "nullptr"
        table = address(rest[-1]) if has_table else "nullptr"
        pointers = ", ".join((address(q), address(k), address(v), mask, table, address(self)))
        name = f"decode_{PRODUCTS[self.get_dtype()]}"
        written = ", ".join(map(str, sizes))
        return f"{{ const int64_t sizes[] = {{{written}}}; {name}(sizes, {scale!r}, {pointers}); }}"


def _decode_attention(q: Any, k: Any, v: Any, mask: Any, table: Any, scale: float) -> Any:
    node: Any = V.graph.current_node
    if V.graph.cpp_wrapper:  # In Python the call copies tensors that are not in rows.
        q, k, v = (
            realize_rows(x, n.meta["val"]) for x, n in zip((q, k, v), node.args[:3], strict=True)
        )
        mask, table = mask and without_gaps(mask), table and without_gaps(table)
    tensors = [ir.ExternKernel.realize_input(t) for t in (q, k, v, mask, table) if t is not None]
    layout = ir.FixedLayout(q.get_device(), q.get_dtype(), *expressions(node.meta["val"]))
    constants = mask is not None, table is not None, scale
    call = DecodeCall(layout, tensors, constants, python_kernel_name=NAME)
    return ir.TensorBox.create(call)


def register() -> None:
    """Add the lowering to Inductor's registry."""
    op = torch.ops.ipex.decode_attention.default
    register_lowering(op, type_promotion_kind=None)(_decode_attention)
