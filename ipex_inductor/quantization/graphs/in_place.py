"""Replace in-place operators of a captured graph by those that return a new tensor."""

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten

# Operators without an alias in their schema that return a view, or their input, if they can.
MAY_BE_VIEWS = {
    *("reshape", "reshape_as", "flatten", "ravel", "contiguous", "to", "type_as", "expand_as"),
    *("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout", "positive"),
    *("atleast_1d", "atleast_2d", "atleast_3d", "broadcast_tensors", "meshgrid"),
    *("unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes", "resolve_conj", "resolve_neg"),
}
CHANGED = "changed_in_place"  # key of a node's meta: True for values that a node changes


def replace_in_place_ops(graph: Graph) -> None:
    """Replace `relu_`, `add_` and others where the changed tensor shares its memory with no other.

    What remains marks the tensors that it writes, and all that share their memory, as changed.
    """
    order = {node: number for number, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if _changes_an_argument(node) and not _replace(node, order):
            for written in _written_nodes(node):
                _mark_changed(written)


def _schema_of(node: Node) -> Any:
    return getattr(node.target, "_schema", None) if node.op == "call_function" else None


def _changes_an_argument(node: Node) -> bool:
    schema = _schema_of(node)
    return schema is not None and schema.is_mutable


def _written_nodes(node: Node) -> Iterator[Node]:
    """Yield the arguments that a node writes, with those in lists and of `out=`."""
    schema = _schema_of(node)
    for index, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        is_positional = index < len(node.args) and not argument.kwarg_only
        value = node.args[index] if is_positional else node.kwargs.get(argument.name)
        yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, Node))


def _shares_memory(node: Node) -> bool:
    """Return whether a node's result may be a view of its first argument."""
    schema = _schema_of(node)
    if schema is None:
        return node.target is operator.getitem
    aliases = [result.alias_info for result in schema.returns if result.alias_info is not None]
    is_view = any(not alias.is_write for alias in aliases)
    return is_view or schema.name.split("::")[-1] in MAY_BE_VIEWS


def _replace(node: Node, order: dict[Node, int]) -> bool:
    written, functional = list(_written_nodes(node)), _functional_overload(node)
    if functional is None or len(written) != 1 or written[0] is not node.args[0]:
        return False
    changed = written[0]
    if changed.op != "call_function":
        return False
    if _shares_memory(changed) or any(_shares_memory(user) for user in changed.users):
        return False
    later = [user for user in changed.users if order[user] > order[node]]
    with node.graph.inserting_before(node):
        new = _call_functional(functional, node, changed)
    order[new] = order[node]
    node.replace_all_uses_with(new)
    for user in later:
        user.replace_input_with(changed, new)
    node.graph.erase_node(node)
    return True


def _call_functional(functional: Any, node: Node, changed: Node) -> Node:
    """Return a node that computes what `node` writes, in the type of the changed tensor."""
    result = node.graph.call_function(functional, node.args, node.kwargs)
    result.meta = dict(node.meta)
    value = changed.meta.get("val")
    dtype = _result_type(functional, node)
    if not isinstance(value, Tensor) or dtype is value.dtype:
        return result
    cast = node.graph.call_function(aten.to.dtype, (result, value.dtype))
    cast.meta = dict(node.meta)
    if dtype is not None:
        result.meta["val"] = value.to(dtype)
    return cast


def _result_type(functional: Any, node: Node) -> torch.dtype | None:
    """Return the type that an operator returns, None if tensors of one element do not show it."""
    args, kwargs = map_arg((node.args, node.kwargs), lambda each: _sample(each.meta.get("val")))
    try:
        result = functional(*args, **kwargs)
    except Exception:  # sizes that do not fit, or an operator without a meta kernel
        return None
    return result.dtype if isinstance(result, Tensor) else None


def _sample(value: Any) -> Any:
    """Return a tensor of one element without data, 1 for a size."""
    if not isinstance(value, Tensor):
        return 1
    return torch.empty([1] * value.dim(), dtype=value.dtype, device="meta")


def _functional_overload(node: Node) -> Any:
    target: Any = node.target
    packet_name, overload = target._schema.name.split("::")[-1], target._overloadname
    if not packet_name.endswith("_") or target.namespace != "aten":
        return None
    packet = getattr(torch.ops.aten, packet_name.removesuffix("_"), None)
    return getattr(packet, overload, None)


def _mark_changed(value: Node) -> None:
    """Mark a value and all that share its memory."""
    pending = [value]
    while pending:
        node = pending.pop()
        if node.meta.get(CHANGED):
            continue
        node.meta[CHANGED] = True
        pending += [u for u in node.users if _shares_memory(u) or _changes_an_argument(u)]
        if _shares_memory(node):
            pending += [leaf for leaf in tree_leaves(node.args[0]) if isinstance(leaf, Node)]
