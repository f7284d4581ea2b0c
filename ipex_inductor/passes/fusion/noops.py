"""What nobody can tell from its input, removed: clones that dropout leaves, views there and back.

Inductor removes them too, but only behind our rules, which they would keep from firing.
"""

import operator
from typing import Any

import torch

from ipex_inductor.passes.engine.rule import equal_shapes

Node = torch.fx.Node
aten = torch.ops.aten


def drop_noops(graph: torch.fx.Graph) -> None:
    """Remove clones of what is used for nothing else, and views that lead back to their origin."""
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
    graph.eliminate_dead_code()  # a view on the way there would count as a user


def _is_own(node: Any) -> bool:
    """Whether `node` was computed here, and none but its one user sees its memory."""
    if not isinstance(node, Node) or node.op != "call_function" or len(node.users) != 1:
        return False
    if node.target is operator.getitem:
        return not _is_view(node.args[0])
    return not _is_view(node) or _is_own(node.args[0])


def _is_view(node: Any) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.is_view


def _origin(node: Node) -> Node | None:
    """The value with the shape of `node` that it is a view of a view of, if there is one."""
    source: Any = node.args[0]
    while source.op == "call_function" and source.target is aten.view.default:
        source = source.args[0]
        if equal_shapes(source.meta["val"], node.meta["val"]):
            found: Node = source
            return found
    return None
