"""Nodes that depend on weights alone, and those among them that are worth computing ahead."""

from collections.abc import Container, Iterable, Sequence
from itertools import chain
from typing import Any

import torch

from ipex_inductor import compat
from ipex_inductor.passes.weights.packing import ARRANGED, PACKERS
from ipex_inductor.passes.weights.pure import is_pure

Node = torch.fx.Node

CASTS = (torch.ops.prims.convert_element_type.default, torch.ops.aten._to_copy.default)
# Their results are read in any case, and are not opaque.
ARRANGERS = (
    torch.ops.ipex.sycl_packed.default,
    torch.ops.ipex.int8_weight.default,
    torch.ops.ipex.weight_only_factors.default,
)
SCALE_OPS = (torch.ops.ipex.int8_factors.default, torch.ops.ipex.int8_scales.default)
GROUPED = torch.ops.ipex.conv_grouped.default
# Calls that nothing is fused into: their inputs are materialized.
CALLS = frozenset({torch.ops.ipex.conv.default, torch.ops.ipex.linear.default, *ARRANGED})
SMALL = 1 << 20  # bytes; a tensor up to this size stays in cache, so it may grow


def weight_inputs(graph: torch.fx.Graph, numbers: Iterable[int]) -> dict[Node, int]:
    """Return the inputs with these numbers that can be hoisted and whose changes can be seen.

    Left out are inputs that the graph writes, parts of a tensor subclass (a DTensor's shard), whose
    version stands still when the subclass is written, and inputs of a higher-order op's body.
    """
    placeholders = graph.find_nodes(op="placeholder")
    written = written_inputs(graph)
    inputs = {placeholders[i]: i for i in numbers if i < len(placeholders)}
    return {
        node: i
        for node, i in inputs.items()
        if node not in written and compat.is_own_input(node) and _is_strided(node.meta.get("val"))
    }


def written_inputs(graph: torch.fx.Graph) -> set[Node]:
    """Return the inputs that some node writes to, or may write to (higher-order ops)."""
    written: set[Node] = set()
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            written.update(node.all_input_nodes)
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        for value, argument in zip(node.args, node.target._schema.arguments, strict=False):
            if argument.alias_info and argument.alias_info.is_write and isinstance(value, Node):
                written.add(value)
    return written


def weight_only(graph: torch.fx.Graph, weights: Container[Node]) -> dict[Node, None]:
    """Return the pure nodes that depend on weights and constants alone, in graph order."""
    derived: dict[Node, None] = {}
    for node in graph.nodes:
        inputs = node.all_input_nodes
        if not inputs and not _is_scale(node):
            continue
        if is_pure(node) and all(n in weights or n in derived for n in inputs):
            derived[node] = None
    return derived


def _is_scale(node: Node) -> bool:
    """Return whether a node is a constant that only ops on scales of quantized weights read."""
    is_constant = node.target is torch.ops.aten.full.default
    return is_constant and all(user.target in SCALE_OPS for user in node.users)


def with_derived(graph: torch.fx.Graph, weights: dict[Node, int]) -> dict[Node, int | None]:
    """Return weights and the pure nodes that depend on them and constants alone."""
    return {**weights, **weight_only(graph, weights)}


def is_worth_hoisting(node: Node, derived: dict[Node, None]) -> bool:
    """Return whether to compute `node` ahead: the graph's rest reads it, and it has a cost.

    A view or a widening cast is free where it stands. A large tensor that is larger than its
    sources costs more to read than to compute, except for the blocks of a grouped convolution,
    which are read in any case. A tensor that the caller gets may be written by the caller.
    """
    if node.target in PACKERS or node.target in ARRANGERS:
        return True
    if all(user in derived for user in node.users) or _leaves_the_graph(node):
        return False
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not is_static(node):
        return False
    links = find_ancestors([node], derived)
    sources = {n for link in links for n in link.all_input_nodes if n not in derived}
    grows = count_bytes(value) > sum(count_bytes(n.meta["val"]) for n in sources)
    if all(_is_view(n) or (grows and n.target in CASTS) for n in links):
        return node.target in CASTS and any(n.target in CALLS for n in node.users)
    return not grows or count_bytes(value) <= SMALL or any(n.target is GROUPED for n in node.users)


def drop_unread(graph: torch.fx.Graph, outputs: Sequence[Node]) -> list[Node]:
    """Return the outputs that are read by something that is not computed ahead itself.

    A packed weight has no such reader where its product is on weights too: the graph would take a
    tensor that it does not use.
    """
    ends, reached = {*outputs}, set[Node]()
    pending = [node for node in graph.nodes if node.op == "output" or node.is_impure()]
    while pending:
        fresh = {*pending.pop().all_input_nodes} - reached
        reached |= fresh
        pending.extend(fresh - ends)
    return [node for node in outputs if node in reached]


def _leaves_the_graph(node: Node) -> bool:
    """Return whether the caller gets `node` or a view of it, and could write it."""
    return any(
        user.op == "output" or (_is_view(user) and _leaves_the_graph(user)) for user in node.users
    )


def _is_strided(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout == torch.strided


def is_static(node: Node) -> bool:
    """Return whether all sizes of a node's tensor are numbers."""
    return all(isinstance(size, int) for size in node.meta["val"].shape)


def _is_view(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.is_view


def count_bytes(value: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements."""
    return value.numel() * value.element_size()


def find_ancestors(nodes: Sequence[Node], within: dict[Node, None]) -> set[Node]:
    """Return `nodes` and all that they are computed from `within` a set of nodes."""
    ancestors: set[Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in ancestors:
            ancestors.add(node)
            pending.extend(n for n in node.all_input_nodes if n in within)
    return ancestors


def join_dependent(nodes: Iterable[Node]) -> list[list[Node]]:
    """Return `nodes`, which come in graph order, in parts between which no value passes."""
    parts: dict[Node, list[Node]] = {}
    for node in nodes:
        joined = {id(parts[n]): parts[n] for n in node.all_input_nodes if n in parts}
        part = [*chain.from_iterable(joined.values()), node]
        parts.update(dict.fromkeys(part, part))
    return list({id(part): part for part in parts.values()}.values())
