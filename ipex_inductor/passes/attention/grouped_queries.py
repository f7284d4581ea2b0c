"""Rewrite attention whose keys several queries share, so that each key is read once.

A decoder with fewer heads of keys than of queries repeats keys and values for torch's attention
(transformers' `repeat_kv` wherever there is a mask), so a token that reads a cache writes and reads
each key once per query head. Where a head has few queries, the queries that share a key are made
rows of one head. The pass reads Dynamo's graph, as `masks` does: AOT autograd decomposes attention.

Grouped-query attention: Ainslie et al. 2023, arXiv:2305.13245.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import map_arg

from ipex_inductor.passes.attention.scores import same
from ipex_inductor.passes.attention.traced import (
    apply_methods,
    arguments,
    compute_fake_attention,
    is_fused,
    may_be_written,
    methods,
    try_rule,
)
from ipex_inductor.passes.engine.literals import Refused, example, torch_name
from ipex_inductor.passes.engine.source import ATTEND, attentions
from ipex_inductor.reporting.decisions import GraphReport

Node = torch.fx.Node
Calls = list[tuple[Any, ...]]

NAME = "grouped-queries"
# The most rows of a head after grouping: one block of torch's kernels, which reads the keys once.
MOST_ROWS = 64
COPIES = ("contiguous", "clone")
JOINS = ("reshape", "view", "flatten")
REPEATS = ("repeat_interleave",)
# Layouts in which torch's kernels return the result: unchanged, whole heads, or rows of all heads.
WHOLE = ("contiguous",)
LAYOUTS: tuple[Calls, ...] = (
    [],
    [WHOLE],
    [("transpose", 1, 2), WHOLE, ("transpose", 1, 2)],
)


@dataclass(frozen=True)
class Group:
    """The keys and values of a call before they are repeated, the repeats, and rows per head."""

    keys: Node
    values: Node
    times: int
    rows: int

    def __str__(self) -> str:
        return f"{self.times} heads of queries share keys"

    def group_rows(self) -> Calls:
        """Return the method calls that make the queries of a group rows of one head.

        They turn queries [B, heads, rows, D], or a mask by heads, into [B, heads of keys, all rows,
        D].
        """
        return [("unflatten", 1, (-1, self.times)), ("flatten", 2, 3)]

    def ungroup_rows(self) -> Calls:
        """Return the method calls that undo `group_rows` on the result."""
        last = ("permute", 0, 3, 1, 2, 4), ("flatten", 2, 3), ("transpose", 1, 2)
        return [("unflatten", 2, (self.times, self.rows)), *last]

    def of_mask(self, shape: torch.Size, heads: int) -> Calls:
        """Return the method calls that fit a mask of `shape` to grouped rows. Raises `Refused`."""
        new: Calls = [("unsqueeze", 0)] * (4 - len(shape))
        by_head, by_row = ([1] * (4 - len(shape)) + [*shape])[1:3]
        if by_head == heads and (by_row == self.rows):
            return new + self.group_rows()
        if by_head != 1:
            raise Refused("the mask does not have the heads and rows of the scores")
        if by_row == 1:
            return []
        return [*new, ("expand", -1, self.times, -1, -1), ("unsqueeze", 1), ("flatten", 2, 3)]


def find_shared_keys(
    graph: torch.fx.Graph, report: GraphReport, off: Collection[str] = ()
) -> set[str]:
    """Return the names of calls whose keys and values need not be repeated; report each of them."""
    on = not {"*", NAME} & {*off}
    nodes = attentions(graph) if on else ()
    return {node.name for node in nodes if try_rule(NAME, _find_checked_group, node, report)}


def change(graph: torch.fx.Graph, names: Collection[str]) -> None:
    """Rewrite the calls that `find_shared_keys` named, and remove what repeated their keys."""
    for node in [n for n in attentions(graph) if n.name in names]:
        group, call = _group(node), arguments(node)
        assert group is not None
        with graph.inserting_before(node):
            arguments_after = {k: v for k, v in call.items() if k != "enable_gqa"}
            arguments_after |= {"key": group.keys, "value": group.values}
            arguments_after["query"] = methods(call["query"], group.group_rows())
            if isinstance(mask := call.get("attn_mask"), Node):
                calls = group.of_mask(example(mask).shape, example(call["query"]).shape[1])
                arguments_after["attn_mask"] = methods(mask, calls)
            attention = graph.call_function(ATTEND, (), arguments_after)
            attention.meta = {
                **node.meta,
                "example_value": compute_fake_attention(map_arg(arguments_after, example)),
            }
            result = methods(attention, group.ungroup_rows())
            result = methods(result, _match_strides(example(result), example(node)))
        node.replace_all_uses_with(result)
        graph.erase_node(node)
        _remove(call["key"], group.keys)
        _remove(call["value"], group.values)


def _remove(node: Node, first: Node) -> None:
    """Erase the nodes that repeat `first`, as far as nothing else reads them.

    They are erased one by one: fx's dead code elimination would also erase in-place methods
    (`index_copy_`).
    """
    while node is not first and not node.users:
        before = node.args[0]
        assert isinstance(before, Node)
        node.graph.erase_node(node)
        node = before


def _find_checked_group(node: Node) -> Group | None:
    """Return the group of a call that may be rewritten, None if there is none. Raises `Refused`."""
    group = _group(node)
    if group is not None:
        _check(node, group)
    return group


def _group(node: Node) -> Group | None:
    """Return the group of a call whose keys and values are repeated for few queries, or None."""
    call = arguments(node)
    query, rows = example(call["query"]), example(call["query"]).shape[-2]
    if query.dim() != 4 or not isinstance(rows, int):
        return None
    if call.get("enable_gqa"):
        heads = query.shape[1], example(call["key"]).shape[1]
        if not all(isinstance(n, int) for n in heads) or is_fused(map_arg(call, example)):
            return None
        group = Group(call["key"], call["value"], heads[0] // heads[1], rows)
    else:
        keys, values = _find_repeated(call["key"]), _find_repeated(call["value"])
        if keys is None or values is None or keys[1] != values[1]:
            return None
        group = Group(keys[0], values[0], keys[1], rows)
    return group if group.times > 1 and group.times * rows <= MOST_ROWS else None


def _find_repeated(node: Any) -> tuple[Node, int] | None:
    """Return the [B, heads, tokens, D] that `node` repeats, and how often; None if it is no repeat.

    Each head is repeated in place: its copies follow one another.
    """
    chain = _sources(node)
    node = next(chain, None)
    if node is not None and torch_name(node) in REPEATS:
        call = dict(zip(("input", "repeats", "dim"), node.args, strict=False)) | node.kwargs
        times, first = call["repeats"], next(chain, None)
        heads = isinstance(times, int) and call.get("dim") in (1, -3)
        return (first, times) if first and heads else None
    wide, one, first = (next(chain, None) for _ in range(3))
    if node is None or wide is None or one is None or first is None:
        return None
    kinds = torch_name(node) in JOINS, torch_name(wide) == "expand", _only_adds(one)
    shapes = [tuple(example(n).shape) for n in (node, wide, one, first)]
    if not all(kinds) or [*map(len, shapes)] != [4, 5, 5, 4]:
        return None
    batch, heads, tokens, width = shapes[3]
    times = shapes[1][2]
    if not isinstance(times, int) or not isinstance(heads, int):
        return None
    wanted = (
        (batch, heads * times, tokens, width),
        (batch, heads, times, tokens, width),
        (batch, heads, 1, tokens, width),
    )
    return (first, times) if all(map(same, shapes, wanted)) else None


def _sources(node: Any) -> Iterator[Node]:
    """Yield a node and the chain of first tensor arguments above it, without plain copies."""
    while isinstance(node, Node) and isinstance(example(node), Tensor):
        if torch_name(node) not in COPIES:
            yield node
        node = node.args[0] if node.args else None


def _only_adds(node: Node) -> bool:
    """Return whether a node is `x.unsqueeze(...)`, or `x[...]` of whole dimensions.

    The caller compares shapes to see which dimension is added.
    """
    if torch_name(node) == "unsqueeze":
        return True
    index = node.args[1] if torch_name(node) == "getitem" else None
    return isinstance(index, tuple) and all(
        item is None or item is Ellipsis or item == slice(None) for item in index
    )


def _check(node: Node, group: Group) -> None:
    """Raise `Refused` unless the call can be rewritten and then has a fused kernel."""
    call = arguments(node)
    if call.get("is_causal"):
        raise Refused("is_causal hides keys by row")
    if call.get("dropout_p"):
        raise Refused("other numbers would be dropped")
    read = [(call["key"], group.keys), (call["value"], group.values)]
    if any(copy is not first and may_be_written(copy, node) for copy, first in read):
        raise Refused("a tensor may be written before it is read")
    fake_call = _change_arguments(call, group)
    if not is_fused(fake_call):
        raise Refused("torch has no fused kernel for the rewritten call")
    wanted = example(node)
    result = apply_methods(compute_fake_attention(fake_call), group.ungroup_rows())
    if not same(result.shape, wanted.shape) or result.dtype != wanted.dtype:
        raise Refused("the result would have another shape or dtype")
    _match_strides(result, wanted)


def _change_arguments(call: dict[str, Any], group: Group) -> dict[str, Any]:
    """Return the fake arguments of the call after the rewrite."""
    fake_call = {
        name: map_arg(part, example) for name, part in call.items() if name != "enable_gqa"
    }
    heads, mask = fake_call["query"].shape[1], fake_call.get("attn_mask")
    fake_call |= {"query": apply_methods(fake_call["query"], group.group_rows())}
    if mask is not None:
        fake_call |= {"attn_mask": apply_methods(mask, group.of_mask(mask.shape, heads))}
    return fake_call | {"key": example(group.keys), "value": example(group.values)}


def _match_strides(result: Tensor, wanted: Tensor) -> Calls:
    """Return the method calls that give a result the strides of `wanted`. Raises `Refused`.

    Strides of dimensions with one element are not compared.
    """
    strides = _strides(wanted)
    for calls in LAYOUTS:
        if same(_strides(apply_methods(result, calls)), strides):
            return calls
    raise Refused("the result would have other strides")


def _strides(x: Tensor) -> list[Any]:
    sizes = zip(x.shape, x.stride(), strict=True)
    return [step for size, step in sizes if not same((size,), (1,))]
