"""Lowering of `ipex::decode_attention` on NVIDIA GPUs to a Triton template."""

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch._inductor import ir
from torch._inductor.lowering import lowerings
from torch._inductor.virtualized import V

from ipex_inductor.lowerings.attention.attention_call import broadcast_strides
from ipex_inductor.lowerings.common.conv_templates import ints
from ipex_inductor.lowerings.common.templated import dense, facts, node, template
from ipex_inductor.lowerings.problem import selector_hook
from ipex_inductor.ops.common.defining import Arguments
from ipex_inductor.templates.triton import decode_attention
from ipex_inductor.templates.triton.decode_attention import Mask

aten = torch.ops.aten
# Counters of a graph, by their number and device. Each kernel leaves them zero for the next one.
_counters: WeakKeyDictionary[Any, dict[tuple[int, torch.device], Any]] = WeakKeyDictionary()


def _grid(batch: Any, heads: Any, rows: Any, width: Any, meta: Any) -> tuple[Any, ...]:
    return meta["GROUPS"], meta["PARTS"], 1


def lower(call: Arguments) -> Any:
    """Return attention of few queries over a cache, by the template."""
    current: Any = V.graph.current_node
    values = [n.meta["val"] for n in current.args[:3]]
    shape, keys = [*values[0].shape], values[1].shape[2]
    multiprocessors, _ = facts(selector_hook.arch_of(call.q.get_device()))
    groups = shape[0] * shape[1]
    tile = decode_attention.choose_tile(groups, keys, shape[3], multiprocessors)
    tensors = [_in_rows(x, v) for x, v in zip((call.q, call.k, call.v), values, strict=True)]
    mask = None if call.mask is None else dense(call.mask)
    constants = decode_attention.constants(
        *(shape, keys, [value.stride() for value in values]),
        *(mask and _describe(mask, [*shape[:3], keys]), call.scale, tile),
    )
    counters = [_find_counters(groups, call.q.get_device())] if tile.parts > 1 else []
    strides = current.meta["val"].stride()
    return node(
        template(decode_attention.NAME, decode_attention.source(), _grid),
        [*tensors, *([] if mask is None else [mask]), *counters],
        ir.FixedLayout(call.q.get_device(), call.q.get_dtype(), shape, [*strides]),
        tile.num_warps,
        tile.num_stages,
        written=counters,
        workspace=decode_attention.workspace(shape, tile),
        **constants,
    )


def _in_rows(x: Any, value: torch.Tensor) -> Any:
    """Return `x` in memory with the strides that it was traced with."""
    return ir.ExternKernel.require_exact_strides(ir.ExternKernel.realize_input(x), value.stride())


def _describe(mask: Any, scores: list[int]) -> Mask:
    """Return how the kernel reads a mask that broadcasts to `scores`, [B, H, Q, K]."""
    rows = 1 if len(mask.get_size()) < 2 else ints(mask.get_size())[-2]
    return Mask(mask.get_dtype() is not torch.bool, rows, ints(broadcast_strides(mask, scores)))


def _find_counters(count: int, device: torch.device) -> Any:
    """Return zeros that the kernels of this graph share."""
    made = _counters.setdefault(V.graph, {})
    key = count, device
    if key not in made:
        zeros = lowerings[aten.full.default]([count], 0, dtype=torch.int32, device=device)
        zeros.realize()
        made[key] = zeros
    return made[key]
