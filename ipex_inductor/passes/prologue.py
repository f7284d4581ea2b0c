"""The weight prologue: work that depends on weights alone, taken out of an inference graph."""

import operator
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ipex_inductor.passes.packing import PACKERS, fit_to_kernels, pack_weights
from ipex_inductor.passes.program import Program, record
from ipex_inductor.report import GraphReport

Node = torch.fx.Node

CASTS = (torch.ops.prims.convert_element_type.default, torch.ops.aten._to_copy.default)
SMALL = 1 << 20  # bytes: such a tensor stays in cache, so it may grow


@dataclass(frozen=True)
class Split:
    """A graph without its weight-only work: `gm` takes the derived tensors as last inputs."""

    gm: torch.fx.GraphModule
    example_inputs: list[Any]
    static_input_idxs: list[int]
    program: Program


def split(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    static_input_idxs: Sequence[int],
    report: GraphReport,
) -> Split | None:
    """Pack and hoist the weight-only work of `gm` (changed in place), or None when there is none.

    `static_input_idxs` are the inputs that are parameters or buffers; one that the graph itself
    writes is not a weight. Without any, all that happens is that our ops are unfused again.
    """
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    written = written_inputs(gm.graph)
    weights = {placeholders[i]: i for i in static_input_idxs if placeholders[i] not in written}
    weights = {n: i for n, i in weights.items() if isinstance(n.meta.get("val"), torch.Tensor)}
    fit_to_kernels(gm.graph, {**weights, **weight_only(gm.graph, weights)}, report)
    pack_weights(gm.graph, {**weights, **weight_only(gm.graph, weights)}, report)
    for inner in gm.modules():  # bodies of higher-order ops, whose inputs are not ours to number
        if isinstance(inner, torch.fx.GraphModule) and inner is not gm:
            pack_weights(inner.graph, (), report)
            inner.recompile()
    derived = weight_only(gm.graph, weights)
    outputs = [n for n in derived if _worth_hoisting(n, derived)]
    if not outputs:
        gm.recompile()
        return None
    needed = _ancestors(outputs, derived)
    used = {n: i for n, i in weights.items() if any(user in needed for user in n.users)}
    program = record(used, [n for n in derived if n in needed], outputs)
    report.add("hoisted", "weight prologue", f"{len(outputs)} tensors of {len(used)} weights")
    _replace_by_inputs(gm.graph, placeholders[-1], outputs)
    gm.recompile()
    count = len(placeholders)
    return Split(
        gm,
        [*example_inputs, *(n.meta["val"] for n in outputs)],
        [*static_input_idxs, *range(count, count + len(outputs))],
        program,
    )


def written_inputs(graph: torch.fx.Graph) -> set[Node]:
    """Inputs that some node of the graph writes to, or may write to (higher-order ops)."""
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
    """Pure nodes that depend on weights and constants alone, in graph order."""
    known: dict[Node, None] = {}
    for node in graph.nodes:
        inputs = node.all_input_nodes
        if inputs and _is_pure(node) and all(n in weights or n in known for n in inputs):
            known[node] = None
    return known


def _is_pure(node: Node) -> bool:
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    random = torch.Tag.nondeterministic_seeded in node.target.tags
    return not node.target._schema.is_mutable and not random


def _worth_hoisting(node: Node, derived: dict[Node, None]) -> bool:
    """Whether to compute `node` ahead: the rest of the graph reads it, and it costs something.

    A view or a widening cast is free where it stands; a large tensor that is larger still than its
    sources costs more to read than to compute; what the caller gets, the caller may write.
    """
    if node.target in PACKERS:
        return True
    if all(user in derived for user in node.users) or _leaves_the_graph(node):
        return False
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not all(isinstance(s, int) for s in value.shape):
        return False
    chain = _ancestors([node], derived)
    sources = {n for link in chain for n in link.all_input_nodes if n not in derived}
    grows = _bytes(value) > sum(_bytes(n.meta["val"]) for n in sources)
    if all(_is_view(n) or (grows and n.target in CASTS) for n in chain):
        return False
    return not grows or _bytes(value) <= SMALL


def _leaves_the_graph(node: Node) -> bool:
    """Whether the caller gets `node` or a view of it, and could write it."""
    return any(
        user.op == "output" or (_is_view(user) and _leaves_the_graph(user)) for user in node.users
    )


def _is_view(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.is_view


def _bytes(value: torch.Tensor) -> int:
    return value.numel() * value.element_size()


def _ancestors(nodes: Sequence[Node], within: dict[Node, None]) -> set[Node]:
    found: set[Node] = set()
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo.extend(n for n in node.all_input_nodes if n in within)
    return found


def _replace_by_inputs(graph: torch.fx.Graph, last: Node, outputs: Sequence[Node]) -> None:
    for number, node in enumerate(outputs):
        with graph.inserting_after(last):
            last = graph.placeholder(f"derived_{number}")
        last.meta = {"val": node.meta["val"]}
        node.replace_all_uses_with(last)
    graph.eliminate_dead_code()
