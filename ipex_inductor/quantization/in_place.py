"""In-place operators of a captured graph, replaced by those that return a new tensor."""

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

# Operators without an alias in their schema that return a view, or their input, if they can.
MAY_BE_VIEWS = {"reshape", "flatten", "contiguous", "to", "dropout", "type_as", "expand_as"}
CHANGED = "changed_in_place"  # key of a node's meta: True for values that a node changes


def replace_in_place_ops(graph: Graph) -> None:
    """Replace `relu_`, `add_` and others where the changed tensor shares its memory with no other.

    What remains marks its tensor, and all that share its memory, as changed.
    """
    order = {node: number for number, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if _changes_an_argument(node) and not _replace(node, order):
            _mark_changed(node.args[0])


def _schema_of(node: Node) -> Any:
    return getattr(node.target, "_schema", None) if node.op == "call_function" else None


def _changes_an_argument(node: Node) -> bool:
    schema = _schema_of(node)
    return schema is not None and schema.is_mutable


def _shares_memory(node: Node) -> bool:
    """Return whether a node's result may be a view of its first argument."""
    schema = _schema_of(node)
    if schema is None:
        return node.target is operator.getitem
    aliases = [result.alias_info for result in schema.returns if result.alias_info is not None]
    is_view = any(not alias.is_write for alias in aliases)
    return is_view or schema.name.split("::")[-1] in MAY_BE_VIEWS


def _replace(node: Node, order: dict[Node, int]) -> bool:
    changed = node.args[0] if node.args else None
    functional = _functional_overload(node)
    if functional is None or not isinstance(changed, Node) or changed.op != "call_function":
        return False
    if _shares_memory(changed) or any(_shares_memory(user) for user in changed.users):
        return False
    later = [user for user in changed.users if order[user] > order[node]]
    with node.graph.inserting_before(node):
        new = node.graph.call_function(functional, node.args, node.kwargs)
    new.meta, order[new] = dict(node.meta), order[node]
    node.replace_all_uses_with(new)
    for user in later:
        user.replace_input_with(changed, new)
    node.graph.erase_node(node)
    return True


def _functional_overload(node: Node) -> Any:
    target: Any = node.target
    packet_name, overload = target._schema.name.split("::")[-1], target._overloadname
    if not packet_name.endswith("_") or target.namespace != "aten":
        return None
    packet = getattr(torch.ops.aten, packet_name.removesuffix("_"), None)
    return getattr(packet, overload, None)


def _mark_changed(value: Any) -> None:
    """Mark a value and all that share its memory."""
    pending = [value] if isinstance(value, Node) else []
    while pending:
        node = pending.pop()
        if node.meta.get(CHANGED):
            continue
        node.meta[CHANGED] = True
        pending += [u for u in node.users if _shares_memory(u) or _changes_an_argument(u)]
        if _shares_memory(node) and isinstance(node.args[0], Node):
            pending.append(node.args[0])
