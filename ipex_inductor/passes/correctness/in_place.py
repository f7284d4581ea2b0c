"""Find updates in place that Inductor would get wrong.

Inductor (torch 2.11 to 2.15) writes a scatter, an `index_put` or a list of sums straight into the
operand if nothing reads that afterwards. It overlooks that the op itself reads the operand at other
places (`x[1:] = x[:-1]`), that its result may outlive what is copied into the operand later, and
what such a copy is computed from. These ops are found here, and stay out of place.
"""

import operator
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from ipex_inductor.reporting.decisions import GraphReport

Node = torch.fx.Node
aten = torch.ops.aten

NAME = "update in place"
REASON = "Inductor would overwrite what is still to be read"
# Their results are written before later ops run, so their reads are done by then.
DONE = ("mm", "addmm", "bmm", "baddbmm", "convolution")


def unsafe(
    report: GraphReport, graph: torch.fx.Graph, written: Callable[[Any], Collection[int]]
) -> list[Node]:
    """Return the nodes of `graph` that may not be written into an operand.

    Args:
        report: Gets the number of such nodes.
        graph: The graph after all other passes.
        written: Returns the numbers of the arguments that an op would be written into.
    """
    copied = _find_copied(graph)
    held = []
    for node in graph.nodes:
        for operand in _operands(node, written):
            reads = _reads_elsewhere(node, operand, written)
            if reads or _outlives(node, operand, copied, written):
                held.append(node)
                break
    if held:
        report.add("fired", NAME, f"{len(held)} out of place: {REASON}")
    return held


def _find_copied(graph: torch.fx.Graph) -> dict[Node, Node]:
    """Return the node that is first copied into each input."""
    copied: dict[Node, Node] = {}
    for node in graph.find_nodes(op="call_function", target=aten.copy_.default):
        target, source = node.args[:2]
        if isinstance(target, Node) and isinstance(source, Node):
            copied.setdefault(target, source)
    return copied


def _nodes(value: Any) -> list[Node]:
    nodes: list[Node] = []
    torch.fx.map_arg(value, nodes.append)
    return nodes


def _reads_elsewhere(node: Node, operand: Node, written: Callable[[Any], Collection[int]]) -> bool:
    """Return whether arguments of `node` other than its operands depend on `operand`."""
    aliases = _find_aliases(operand, written)
    operand_numbers = {*written(node.target)}
    pending = [
        source
        for n, value in enumerate(node.args)
        if n not in operand_numbers
        for source in _nodes(value)
    ]
    pending = [source for source in [*pending, *_nodes(node.kwargs)] if source is not operand]
    visited: set[Node] = set()
    while pending:
        source = pending.pop()
        if source in visited:
            continue
        visited.add(source)
        if source in aliases or _storage(source) in aliases:
            return True
        if getattr(source.target, "_opname", "") not in DONE:
            pending += source.all_input_nodes
    return False


def _find_aliases(operand: Node, written: Callable[[Any], Collection[int]]) -> set[Any]:
    """Return nodes and storages that share memory with `operand` if all is written in place."""
    aliases: set[Any] = set()
    while True:
        aliases |= {operand, _storage(operand)}
        source = operand.args[0] if operand.target is operator.getitem else operand
        operands = _operands(source, written) if isinstance(source, Node) else []
        if len(operands) != 1:
            return aliases - {None}
        (operand,) = operands


def _operands(node: Node, written: Callable[[Any], Collection[int]]) -> list[Node]:
    return [operand for n in written(node.target) for operand in _nodes(node.args[n])]


def _storage(node: Node) -> int | None:
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None


def _outlives(
    node: Node,
    operand: Node,
    copied: dict[Node, Node],
    written: Callable[[Any], Collection[int]],
) -> bool:
    """Return whether `operand`, an input, ends as anything else than `node`, or `node` is returned.

    It may end as an op that is written into `node` in turn.
    """
    while (last := _operands(operand, written)) and operand.op == "call_function":
        operand = last[0]
    if operand.op not in ("placeholder", "get_attr") or operand not in copied:
        return False
    if any(user.op == "output" for user in node.users):
        return True
    end: Node = copied[operand]
    while True:
        source: Any = end.args[0] if end.target is operator.getitem else end
        if source is node:
            return False
        before = _operands(source, written)
        if not before:
            return True
        end = before[0]
