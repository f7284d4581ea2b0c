"""Lowerings of `ipex::` ops to kernels, one file a family, and kernel selection for all ops.

Inductor's registry of lowerings is global, so only `ipex::` ops are ever registered here.
"""

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.fx import Node  # Code that only reads records does not need torch.

_LOCK = threading.RLock()  # guards temporary changes of Inductor's tables


def register(sycl: bool = False) -> None:
    """Register the lowering of every `ipex::` op with Inductor.

    Args:
        sycl: whether to implement the ops of SYCL kernels too, which a cached graph may call.
    """
    _register()
    if sycl:
        from ipex_inductor.lowerings.common.sycl import register as kernels

        kernels()


@functools.cache
def _register() -> None:
    from ipex_inductor.lowerings.attention import decode_attention, short_attention
    from ipex_inductor.lowerings.common import conv_templates
    from ipex_inductor.lowerings.conv import (
        batch_norm_relu,
        cached_primitives,
        conv,
        conv_many,
        conv_weight,
        pool,
        residual,
        small_channel_pool,
        winograd,
    )
    from ipex_inductor.lowerings.gemm import (
        blocked,
        glu,
        linear,
        persistent,
        skinny,
        software_pipelined,
        weight_stationary,
    )
    from ipex_inductor.lowerings.pointwise import cat, foreach, moments, relu_masks
    from ipex_inductor.lowerings.quant import (
        fp8,
        fp8_weights,
        int8,
        int8_scaled,
        weight_only,
        weight_only_rows,
    )

    blocked.register()
    cat.register()
    conv.register()
    conv_many.register()
    conv_templates.register()
    conv_weight.register()
    skinny.register()
    foreach.register()
    fp8.register()
    fp8_weights.register()
    glu.register()
    int8.register()
    int8_scaled.register()
    cached_primitives.register()
    linear.register()
    moments.register()
    persistent.register()
    software_pipelined.register()
    pool.register()
    batch_norm_relu.register()
    relu_masks.register()
    decode_attention.register()
    short_attention.register()
    residual.register()
    small_channel_pool.register()
    weight_only.register()
    weight_only_rows.register()
    weight_stationary.register()
    winograd.register()
    _read_memory()


def _read_memory() -> None:
    """Have Inductor compute the inputs of our CPU calls once, as it does for torch's own GEMMs.

    Otherwise an input that is also read elsewhere, for example by a gather, would be computed again
    for each element that is read there.
    """
    import torch
    from torch._inductor.lowering import add_needs_realized_inputs

    from ipex_inductor.templates.cpu import cached_primitives

    ours = torch.ops.ipex
    calls: list[Any] = [ours.blocked, ours.conv, ours.linear, ours.short_attention, ours.winograd]
    calls += [ours.int8_bmm, ours.int8_conv, ours.int8_linear, ours.int8_max_pool]
    calls += [ours.int8_embedding_bag]
    calls += [ours.weight_only_linear, ours.decode_attention]
    add_needs_realized_inputs([*(call.default for call in calls), cached_primitives.KEPT_CONV])  # type: ignore[no-untyped-call]


def is_ours(node: "Node") -> bool:
    """Return whether `node` calls an `ipex::` op."""
    return getattr(node.target, "namespace", "") == "ipex"


@contextlib.contextmanager
def as_written() -> Iterator[None]:
    """Hide the lowerings of `ipex::` ops within the context, so that Inductor calls the ops.

    This also affects graphs that other threads compile meanwhile, which only makes them slower.
    """
    from torch._inductor import lowering

    tables: list[dict[Any, Any]] = [lowering.lowerings, lowering._maybe_layout_constraints]
    sets: list[Any] = [lowering.fallbacks, lowering.needs_realized_inputs]
    with _LOCK:
        ops = {op for op in [*tables[0]] if getattr(op, "namespace", "") == "ipex"}
        entries = [{op: table.pop(op) for op in ops if op in table} for table in tables]
        members = [{op for op in ops if op in names} for names in sets]
        try:
            yield
        finally:
            for table, before in zip(tables, entries, strict=True):
                for op in ops:
                    table.pop(op, None)
                table.update(before)
            for names, previous in zip(sets, members, strict=True):
                names.difference_update(ops - previous)
