"""Attention that Inductor's own patterns take for another one.

Those patterns (torch 2.11 to 2.15, `fuse_attention.py`) leave numbers out of the comparison: which
dimension is normalised, how factors are permuted, viewed and expanded, `alpha` of a sum, what a
mask is compared with and filled by. What they rewrite is then another function, without a word. So
whatever may be one of them is compared here in full, and kept apart from them if it differs.
"""

import math
from collections.abc import Callable
from typing import Any

import torch

from ipex_inductor.decisions import GraphReport
from ipex_inductor.passes.constants import number
from ipex_inductor.passes.rule import is_backward
from ipex_inductor.passes.scores import LOST, VIEWS, dtype, same, shape
from ipex_inductor.passes.source import user_line

Node = torch.fx.Node
Between = dict[Any, bool]  # nodes, and whether they lead to the scores
aten, prims = torch.ops.aten, torch.ops.prims

NAME = "misread_attention"

# How patterns mean factors to be permuted: a key in both ways, the latter first.
HEADS_FIRST, TRANSPOSED = ((0, 2, 1, 3),), ((0, 1, 3, 2), (0, 2, 1))


def keep_apart(graph: torch.fx.Graph, report: GraphReport) -> None:
    """Hide every attention that Inductor would misread behind a view that its patterns lack."""
    found = False
    for product in graph.find_nodes(op="call_function", target=aten.bmm.default):
        if is_backward(product):
            continue
        nodes, between = _between(product)
        ignored = _ignored(product, nodes, between)
        if ignored is not None:
            reason = f"Inductor's own patterns ignore {ignored}"
            report.add("fired", NAME, reason, user_line(product))
            _hide(graph, product)
        elif nodes:
            found = True
    if found:
        _make_scales_float(graph)


def _between(product: Node) -> tuple[list[Node], Between]:
    """All from the product of query and key to the other one, none where `product` is none."""
    between: Between = {}
    _leads_to_scores(product.args[0], between)
    nodes = [node for node, leads in between.items() if leads]
    return (nodes if any(node.target in NORMALISED for node in nodes) else []), between


def _ignored(product: Node, nodes: list[Node], between: Between) -> str | None:
    """What sets attention apart from that of the patterns, if anything does."""
    for node in nodes:
        check = CHECKS.get(node.target)
        ignored = check(node, between) if check else None
        if ignored is not None:
            return ignored
    changed: list[str | None] = []
    for scores in (node for node in nodes if node.target is aten.bmm.default):
        changed.append(_changed(scores.args[1], TRANSPOSED, HEADS_FIRST))
        if any(node.target in VIEWS for node in nodes):  # else in three dimensions throughout
            changed += [_changed(f, HEADS_FIRST) for f in (scores.args[0], product.args[1])]
    return next(filter(None, changed), None)


def _leads_to_scores(node: Any, between: Between) -> bool:
    """Whether patterns may reach a product from `node`; all nodes on the way go to `between`."""
    if not isinstance(node, Node) or node.target not in PASSED:
        return False
    if node not in between:
        inputs = [] if node.target is aten.bmm.default else node.all_input_nodes
        found = [_leads_to_scores(n, between) for n in inputs]
        between[node] = not inputs or any(found)
    return between[node]


def _hide(graph: torch.fx.Graph, product: Node) -> None:
    weights: Any = product.args[0]
    with graph.inserting_before(product):
        wider = graph.call_function(aten.unsqueeze.default, (weights, 0))
        hidden = graph.call_function(aten.squeeze.dim, (wider, 0))
    for node, value in ((wider, weights.meta["val"].unsqueeze(0)), (hidden, weights.meta["val"])):
        node.meta = {**weights.meta, "val": value}
    product.update_arg(0, hidden)


# What is between the products.


def _normalised(node: Node, between: Between) -> str | None:
    dims: Any = node.args[1]
    dims = tuple(dims) if isinstance(dims, (list, tuple)) else (dims,)
    return None if dims in ((-1,), (len(shape(node)) - 1,)) else "what dimension is normalised"


def _viewed(node: Node, between: Between) -> str | None:
    kept = same(shape(node)[-2:], shape(node.args[0])[-2:])
    return None if kept else "that a view changes rows or columns"


def _expanded(node: Node, between: Between) -> str | None:
    return None if same(shape(node), shape(node.args[0])) else "that a factor is expanded"


def _added(node: Node, between: Between) -> str | None:
    if node.kwargs:
        return "that a mask is scaled as it is added"
    scores = next(n for n in node.all_input_nodes if between.get(n))
    return None if same(shape(node), shape(scores)) else "that a mask widens the scores"


def _scaled(node: Node, between: Between) -> str | None:
    x, other = node.args
    drop = _dropout_of(x)
    if drop is None or (isinstance(other, (int, float)) and math.isclose(other * (1 - drop), 1)):
        return None
    return "how dropout is made up for"


def _dropout_of(node: Any) -> float | None:
    """The share that a product with `rand > share` drops."""
    is_product = isinstance(node, Node) and node.target is aten.mul.Tensor
    for factor in node.all_input_nodes if is_product else ():
        mask = factor.args[0] if factor.target is prims.convert_element_type.default else factor
        if isinstance(mask, Node) and mask.target is aten.gt.Scalar:
            return float(mask.args[1])  # type: ignore[arg-type]
    return None


def _chosen(node: Node, between: Between) -> str | None:
    condition, *branches = node.args
    fills = [number(branch) for branch in branches if not between.get(branch)]
    if between.get(condition):  # of all scores: this is torch's safe softmax
        return None if fills == [0] else "by what a row without scores is replaced"
    low = torch.finfo(torch.float16).min if dtype(node) == torch.float16 else LOST
    if not all(fill is not None and fill <= low for fill in fills):
        return "by what masked scores are replaced"
    mask: Any = condition
    while mask.target in (*VIEWS, aten.expand.default, aten.logical_not.default):
        mask = mask.args[0]
    return "what a mask is compared with" if mask.target is aten.eq.Scalar else None


def _compared(node: Node, between: Between) -> str | None:
    return None if node.args[1] == -torch.inf else "what scores are compared with"


Check = Callable[[Node, Between], str | None]
NORMALISED: dict[Any, Check] = dict.fromkeys(
    (aten._softmax.default, aten._safe_softmax.default, aten.amax.default),
    _normalised,
)
CHECKS: dict[Any, Check] = {
    **NORMALISED,
    **dict.fromkeys((aten.sum.dim_IntList, aten.any.dim), _normalised),
    **dict.fromkeys(VIEWS, _viewed),
    aten.expand.default: _expanded,
    aten.add.Tensor: _added,
    aten.mul.Tensor: _scaled,
    aten.where.self: _chosen,
    aten.eq.Scalar: _compared,
}
PASSED = {
    *CHECKS,
    *(aten.bmm.default, aten.clone.default, prims.convert_element_type.default),
    *(aten.div.Tensor, aten.mul.Scalar, aten.sub.Tensor, aten.exp.default),
    aten.logical_not.default,
}


# Query, key and value.


FLATTENED: dict[Any, Check | None] = {
    **dict.fromkeys(VIEWS, _viewed),
    aten.expand.default: _expanded,
    **dict.fromkeys((aten.clone.default, prims.convert_element_type.default)),
    **dict.fromkeys((aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor)),
}


def _changed(node: Any, *permutations: tuple[tuple[int, ...], ...]) -> str | None:
    """What is done to a factor but to flatten, scale and permute it in these ways."""
    while node.target in FLATTENED and isinstance(node.args[0], Node):
        check = FLATTENED[node.target]
        changed = check(node, {}) if check else None
        if changed is not None:
            return changed
        node = node.args[0]
    for known in permutations:
        if node.target is not aten.permute.default:
            return None
        if tuple(node.args[1]) not in known:
            return "how factors are permuted"
        node = node.args[0]
    return None


def _make_scales_float(graph: torch.fx.Graph) -> None:
    """In training, those patterns trace an int as a symbol, which Dynamo's guards do not find."""
    for op in (aten.mul.Tensor, aten.div.Tensor):
        for node in graph.find_nodes(op="call_function", target=op):
            if type(node.args[1]) is int and dtype(node.args[0]).is_floating_point:
                node.update_arg(1, float(node.args[1]))
