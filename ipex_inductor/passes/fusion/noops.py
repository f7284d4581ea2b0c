"""Remove ops without effect: clones that dropout leaves, and views that lead back to their origin.

Inductor removes them too, but only after our rules, which they would keep from matching.
"""

import operator
from typing import Any

import torch

from ipex_inductor.passes.engine.rule import equal_shapes

Node = torch.fx.Node
aten = torch.ops.aten


def drop_noops(graph: torch.fx.Graph) -> None:
    """Remove clones of nodes without other readers, and views that lead back to their origin."""
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        origin = None
        if node.target is aten.clone.default:
            origin = node.args[0] if _is_own(node.args[0]) else None
        elif node.target is aten.view.default:
            origin = _origin(node)
        if origin is not None and origin.meta["val"].stride() == node.meta["val"].stride():
            node.replace_all_uses_with(origin)
    graph.eliminate_dead_code()  # else a dead view would count as a user


def _is_own(node: Any) -> bool:
    """Return whether `node` is computed in the graph, and only its one user sees its memory."""
    if not isinstance(node, Node) or node.op != "call_function" or len(node.users) != 1:
        return False
    if node.target is operator.getitem:
        return not _is_view(node.args[0])
    return not _is_view(node) or _is_own(node.args[0])


def _is_view(node: Any) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.is_view


def _origin(node: Node) -> Node | None:
    """Return the value with the shape of `node` that a chain of views leads back to, or None."""
    source: Any = node.args[0]
    while source.op == "call_function" and source.target is aten.view.default:
        source = source.args[0]
        if equal_shapes(source.meta["val"], node.meta["val"]):
            origin: Node = source
            return origin
    return None
