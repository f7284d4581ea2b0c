"""Attention that Inductor's own patterns take for another one.

Those patterns (torch 2.11 to 2.15, `fuse_attention.py`) leave much out of the comparison: which
dimension is normalised, how factors are permuted, viewed and expanded, `alpha` of a sum, what a
mask is compared with and filled by, that a scale is a tensor or an added mask holds truth values.
What they rewrite is then another function, without a word, or does not compile. So whatever may be
one of them is judged here, and kept apart from them where it is not what they mean.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from ipex_inductor.passes.attention.scores import LOST, VIEWS, dtype, same, shape
from ipex_inductor.passes.engine.constants import constant, number
from ipex_inductor.passes.engine.rule import is_backward
from ipex_inductor.passes.engine.source import user_line
from ipex_inductor.reporting.decisions import GraphReport

Node = torch.fx.Node
Between = dict[Any, bool]  # nodes, and whether they lead to the scores
aten, prims = torch.ops.aten, torch.ops.prims

NAME = "misread_attention"

# How patterns mean factors to be permuted: a key in both ways, the latter first.
HEADS_FIRST, TRANSPOSED = ((0, 2, 1, 3),), ((0, 1, 3, 2), (0, 2, 1))


def keep_apart(graph: torch.fx.Graph, report: GraphReport) -> None:
    """Hide every attention that Inductor would misread behind a view that its patterns lack."""
    left_to_inductor = False
    for product in graph.find_nodes(op="call_function", target=aten.bmm.default):
        between = {} if is_backward(product) else _between(product)
        if not any(leads and node.target in NORMALISED for node, leads in between.items()):
            continue
        ignored = _ignored(product, between)
        if ignored is None:
            left_to_inductor = True
        else:
            reason = f"kept from Inductor's own patterns, which ignore {ignored}"
            report.add("fired", NAME, reason, user_line(product))
            _hide(graph, product)
    if left_to_inductor:
        _make_scales_float(graph)


def _between(product: Node) -> Between:
    """What patterns may pass on their way from `product` up to the product of query and key."""
    met, todo = set(), [product.args[0]]
    while todo:
        node = todo.pop()
        if isinstance(node, Node) and node.target in PASSED and node not in met:
            met.add(node)
            todo += () if node.target is aten.bmm.default else node.all_input_nodes
    between: Between = {}
    for node in sorted(met):
        is_product = node.target is aten.bmm.default
        between[node] = is_product or any(between.get(n) for n in node.all_input_nodes)
    return between


def _ignored(product: Node, between: Between) -> str | None:
    """What sets attention apart from that of the patterns, if anything does."""
    nodes = [node for node, leads in reversed(between.items()) if leads]
    for node in nodes:
        check = CHECKS.get(node.target)
        ignored = check(node, between) if check else None
        if ignored is not None:
            return ignored
    views = [node for node in nodes if node.target in VIEWS]
    for scores in (node for node in nodes if node.target is aten.bmm.default):
        (query, key), value = scores.args, product.args[1]
        ignored = _changed(key, TRANSPOSED, HEADS_FIRST)
        if views and ignored is None:  # else in three dimensions throughout
            ignored = _changed(query, HEADS_FIRST) or _changed(value, HEADS_FIRST)
            heads = [_heads(factor) for factor in (query, key, value)]
            heads += [shape(view)[:2] for view in views if len(shape(view)) == 4]
            if not all(same(heads[0], other) for other in heads):
                ignored = ignored or "how batch and heads are flattened"
        if ignored is not None:
            return ignored
    return None


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
    dims: Any = node.args[1] if len(node.args) > 1 else ()
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
    scores, mask = node.args if between.get(node.args[0]) else node.args[::-1]
    if not isinstance(mask, Node) or len(shape(mask)) < 2:
        return "that what is added is no matrix"
    if dtype(mask) == torch.bool:
        return "that truth values are added"
    return None if same(shape(node), shape(scores)) else "that a mask widens the scores"


def _dropped_out(node: Node, between: Between) -> str | None:
    x, other = node.args
    drop = _dropout_of(x)
    if drop is None or (isinstance(other, (int, float)) and math.isclose(other * (1 - drop), 1)):
        return None
    return "how dropout is made up for"


def _divided(node: Node, between: Between) -> str | None:
    by = node.args[1]
    return "that a scale is a tensor" if isinstance(by, Node) and not between.get(by) else None


def _dropout_of(node: Any) -> float | None:
    """The share that a product with `rand > share` drops."""
    is_product = isinstance(node, Node) and node.target is aten.mul.Tensor
    for factor in node.all_input_nodes if is_product else ():
        mask = factor.args[0] if factor.target is prims.convert_element_type.default else factor
        if isinstance(mask, Node) and mask.target is aten.gt.Scalar:
            share: Any = mask.args[1]
            return float(share)
    return None


def _chosen(node: Node, between: Between) -> str | None:
    condition, *branches = node.args
    scores = [branch for branch in branches if between.get(branch)]
    fill: Any = branches[branches[0] in scores]
    if between.get(condition):  # of all scores: this is torch's safe softmax
        is_zero = fill.target in (aten.full.default, aten.full_like.default) and fill.args[1] == 0
        return None if is_zero else "by what a row without scores is replaced"
    low, lowest = number(fill), LOST
    if dtype(node) == torch.float16:
        lowest = torch.finfo(torch.float16).min
    if low is None or low > lowest:
        return "by what masked scores are replaced"
    with unset_fake_temporarily():
        mask = constant(condition)
        kept = mask if mask is None or fill is branches[1] else ~mask
        if kept is None or not kept.any(-1).all():
            return "what a mask is compared with, and rows masked whole"
    return None


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
    aten.mul.Tensor: _dropped_out,
    aten.div.Tensor: _divided,
    aten.where.self: _chosen,
    aten.eq.Scalar: _compared,
}
PASSED = {
    *CHECKS,
    *(aten.bmm.default, aten.clone.default, prims.convert_element_type.default),
    *(aten.mul.Scalar, aten.sub.Tensor, aten.exp.default),
    aten.logical_not.default,
}


# Query, key and value.


FLATTENED: dict[Any, Check | None] = {
    **dict.fromkeys(VIEWS, _viewed),
    aten.expand.default: _expanded,
    **dict.fromkeys((aten.clone.default, prims.convert_element_type.default)),
    **dict.fromkeys((aten.mul.Tensor, aten.mul.Scalar)),
    aten.div.Tensor: _divided,
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


def _heads(node: Any) -> Any:
    """The dimensions of a factor before its matrices, before they were flattened."""
    while len(shape(node)) == 3 and node.target in FLATTENED:
        node = node.args[0]
    return shape(node)[:-2]


def _make_scales_float(graph: torch.fx.Graph) -> None:
    """In training, those patterns trace an int as a symbol, which Dynamo's guards do not find."""
    for op in (aten.mul.Tensor, aten.div.Tensor):
        for node in graph.find_nodes(op="call_function", target=op):
            if type(node.args[1]) is int and dtype(node.args[0]).is_floating_point:
                node.update_arg(1, float(node.args[1]))
