"""Lowerings: each `ipex::` op to its kernel, one file a family; whose kernel Inductor's ops get.

Inductor's registry of lowerings is global, so only our own ops are ever registered here.
"""

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.fx import Node  # who only reads records needs no torch

_LOCK = threading.RLock()  # around what changes Inductor's own tables for a while


def register(sycl: bool = False) -> None:
    """Tell Inductor how to lower every `ipex::` op.

    `sycl`: have those for kernels in SYCL run some; a graph from the cache may call them too.
    """
    _register()
    if sycl:
        from ipex_inductor.lowerings.common.sycl import register as kernels

        kernels()


@functools.cache
def _register() -> None:
    from ipex_inductor.lowerings.attention import short_attention
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

    blocked.register()
    cat.register()
    conv.register()
    conv_many.register()
    conv_templates.register()
    conv_weight.register()
    skinny.register()
    foreach.register()
    glu.register()
    cached_primitives.register()
    linear.register()
    moments.register()
    persistent.register()
    software_pipelined.register()
    pool.register()
    batch_norm_relu.register()
    relu_masks.register()
    short_attention.register()
    residual.register()
    small_channel_pool.register()
    weight_stationary.register()
    winograd.register()
    _read_memory()


def _read_memory() -> None:
    """Have what our calls on CPUs read computed once, as Inductor has it of torch's own products.

    Else a result that is read elsewhere too, by a gather say, would be computed again for each
    number that is read there.
    """
    import torch
    from torch._inductor.lowering import add_needs_realized_inputs

    from ipex_inductor.templates.cpu import cached_primitives

    ours = torch.ops.ipex
    calls = (ours.blocked, ours.conv, ours.linear, ours.short_attention, ours.winograd)
    add_needs_realized_inputs([*(call.default for call in calls), cached_primitives.KEPT_CONV])  # type: ignore[no-untyped-call]


def is_ours(node: "Node") -> bool:
    """Whether it calls an op of ours."""
    return getattr(node.target, "namespace", "") == "ipex"


@contextlib.contextmanager
def as_written() -> Iterator[None]:
    """Inductor knows no kernel of ours meanwhile: our ops are called as they are written.

    In graphs that other threads compile, too, which only makes those slower.
    """
    from torch._inductor import lowering

    tables: list[dict[Any, Any]] = [lowering.lowerings, lowering._maybe_layout_constraints]
    sets: list[Any] = [lowering.fallbacks, lowering.needs_realized_inputs]
    with _LOCK:
        ops = {op for op in [*tables[0]] if getattr(op, "namespace", "") == "ipex"}
        own = [{op: table.pop(op) for op in ops if op in table} for table in tables]
        named = [{op for op in ops if op in names} for names in sets]
        try:
            yield
        finally:
            for table, before in zip(tables, own, strict=True):
                for op in ops:
                    table.pop(op, None)
                table.update(before)
            for names, had in zip(sets, named, strict=True):
                names.difference_update(ops - had)
