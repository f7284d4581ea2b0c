"""Keep attention from Inductor's own patterns where they would misread it.

The patterns (torch 2.11 to 2.15, `fuse_attention.py`) leave much out of the comparison: which
dimension is normalised, how factors are permuted, viewed and expanded, `alpha` of a sum, what a
mask is compared with and filled by, that a scale is a tensor or an added mask is boolean.
The rewritten graph then computes another function without a warning, or does not compile. Every
candidate for a pattern is therefore checked here, and hidden from them if it is not what they mean.
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
Between = dict[Any, bool]  # nodes, and whether the scores are among their inputs
aten, prims = torch.ops.aten, torch.ops.prims

NAME = "misread_attention"

# Permutations of factors that the patterns mean; a key has both, the transposition first.
HEADS_FIRST, TRANSPOSED = ((0, 2, 1, 3),), ((0, 1, 3, 2), (0, 2, 1))


def keep_apart(graph: torch.fx.Graph, report: GraphReport) -> None:
    """Hide every attention that Inductor would misread behind a view that its patterns lack."""
    left_to_inductor = False
    for product in graph.find_nodes(op="call_function", target=aten.bmm.default):
        between = {} if is_backward(product) else _find_between(product)
        if not any(leads and node.target in NORMALISED for node, leads in between.items()):
            continue
        ignored = _find_ignored(product, between)
        if ignored is None:
            left_to_inductor = True
        else:
            reason = f"kept from Inductor's own patterns, which ignore {ignored}"
            report.add("fired", NAME, reason, user_line(product))
            _hide(graph, product)
    if left_to_inductor:
        _make_scales_float(graph)


def _find_between(product: Node) -> Between:
    """Return the nodes from `product` up to the product of query and key that patterns may pass.

    The values say whether a node leads to the scores.
    """
    reached, pending = set(), [product.args[0]]
    while pending:
        node = pending.pop()
        if isinstance(node, Node) and node.target in PASSED and node not in reached:
            reached.add(node)
            pending += () if node.target is aten.bmm.default else node.all_input_nodes
    between: Between = {}
    for node in sorted(reached):
        is_product = node.target is aten.bmm.default
        between[node] = is_product or any(between.get(n) for n in node.all_input_nodes)
    return between


def _find_ignored(product: Node, between: Between) -> str | None:
    """Return what distinguishes attention from what the patterns mean, None if nothing does."""
    nodes = [node for node, leads in reversed(between.items()) if leads]
    for node in nodes:
        check = CHECKS.get(node.target)
        ignored = check(node, between) if check else None
        if ignored is not None:
            return ignored
    views = [node for node in nodes if node.target in VIEWS]
    for scores in (node for node in nodes if node.target is aten.bmm.default):
        (query, key), value = scores.args, product.args[1]
        ignored = _check_factor(key, TRANSPOSED, HEADS_FIRST)
        if views and ignored is None:  # without views all is in three dimensions
            ignored = _check_factor(query, HEADS_FIRST) or _check_factor(value, HEADS_FIRST)
            heads = [_heads(factor) for factor in (query, key, value)]
            heads += [shape(view)[:2] for view in views if len(shape(view)) == 4]
            if not all(same(heads[0], lead) for lead in heads):
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


# Checks of the operations between the products.


def _check_softmax_dim(node: Node, between: Between) -> str | None:
    dims: Any = node.args[1] if len(node.args) > 1 else ()
    dims = tuple(dims) if isinstance(dims, (list, tuple)) else (dims,)
    return None if dims in ((-1,), (len(shape(node)) - 1,)) else "what dimension is normalised"


def _check_view(node: Node, between: Between) -> str | None:
    is_same = same(shape(node)[-2:], shape(node.args[0])[-2:])
    return None if is_same else "that a view changes rows or columns"


def _check_expand(node: Node, between: Between) -> str | None:
    return None if same(shape(node), shape(node.args[0])) else "that a factor is expanded"


def _check_add(node: Node, between: Between) -> str | None:
    if node.kwargs:
        return "that a mask is scaled as it is added"
    scores, mask = node.args if between.get(node.args[0]) else node.args[::-1]
    if not isinstance(mask, Node) or len(shape(mask)) < 2:
        return "that what is added is no matrix"
    if dtype(mask) == torch.bool:
        return "that a boolean mask is added"
    return None if same(shape(node), shape(scores)) else "that a mask widens the scores"


def _check_dropout(node: Node, between: Between) -> str | None:
    x, factor = node.args
    drop = _dropout_of(x)
    if drop is None or (isinstance(factor, (int, float)) and math.isclose(factor * (1 - drop), 1)):
        return None
    return "how dropout is rescaled"


def _check_div(node: Node, between: Between) -> str | None:
    by = node.args[1]
    return "that a scale is a tensor" if isinstance(by, Node) and not between.get(by) else None


def _dropout_of(node: Any) -> float | None:
    """Return the probability of a dropout, written as a product with `rand > p`, else None."""
    is_product = isinstance(node, Node) and node.target is aten.mul.Tensor
    for factor in node.all_input_nodes if is_product else ():
        mask = factor.args[0] if factor.target is prims.convert_element_type.default else factor
        if isinstance(mask, Node) and mask.target is aten.gt.Scalar:
            share: Any = mask.args[1]
            return float(share)
    return None


def _check_where(node: Node, between: Between) -> str | None:
    condition, *branches = node.args
    scores = [branch for branch in branches if between.get(branch)]
    fill: Any = branches[branches[0] in scores]
    if between.get(condition):  # the condition depends on scores: torch's safe softmax
        is_zero = fill.target in (aten.full.default, aten.full_like.default) and fill.args[1] == 0
        return None if is_zero else "by what a row without scores is replaced"
    low, lowest = number(fill), LOST
    if dtype(node) == torch.float16:
        lowest = torch.finfo(torch.float16).min
    if low is None or low > lowest:
        return "by what masked scores are replaced"
    with unset_fake_temporarily():
        mask = constant(condition)
        visible = mask if mask is None or fill is branches[1] else ~mask
        if visible is None or not visible.any(-1).all():
            return "what a mask is compared with, and rows masked whole"
    return None


def _check_eq(node: Node, between: Between) -> str | None:
    return None if node.args[1] == -torch.inf else "what scores are compared with"


Check = Callable[[Node, Between], str | None]
NORMALISED: dict[Any, Check] = dict.fromkeys(
    (aten._softmax.default, aten._safe_softmax.default, aten.amax.default),
    _check_softmax_dim,
)
CHECKS: dict[Any, Check] = {
    **NORMALISED,
    **dict.fromkeys((aten.sum.dim_IntList, aten.any.dim), _check_softmax_dim),
    **dict.fromkeys(VIEWS, _check_view),
    aten.expand.default: _check_expand,
    aten.add.Tensor: _check_add,
    aten.mul.Tensor: _check_dropout,
    aten.div.Tensor: _check_div,
    aten.where.self: _check_where,
    aten.eq.Scalar: _check_eq,
}
PASSED = {
    *CHECKS,
    *(aten.bmm.default, aten.clone.default, prims.convert_element_type.default),
    *(aten.mul.Scalar, aten.sub.Tensor, aten.exp.default),
    aten.logical_not.default,
}


# Query, key and value.


FLATTENED: dict[Any, Check | None] = {
    **dict.fromkeys(VIEWS, _check_view),
    aten.expand.default: _check_expand,
    **dict.fromkeys((aten.clone.default, prims.convert_element_type.default)),
    **dict.fromkeys((aten.mul.Tensor, aten.mul.Scalar)),
    aten.div.Tensor: _check_div,
}


def _check_factor(node: Any, *permutations: tuple[tuple[int, ...], ...]) -> str | None:
    """Return how a factor is changed other than by flattening, scaling and these permutations."""
    while node.target in FLATTENED and isinstance(node.args[0], Node):
        check = FLATTENED[node.target]
        reason = check(node, {}) if check else None
        if reason is not None:
            return reason
        node = node.args[0]
    for accepted in permutations:
        if node.target is not aten.permute.default:
            return None
        if tuple(node.args[1]) not in accepted:
            return "how factors are permuted"
        node = node.args[0]
    return None


def _heads(node: Any) -> Any:
    """Return the leading dimensions of a factor, before they were flattened."""
    while len(shape(node)) == 3 and node.target in FLATTENED:
        node = node.args[0]
    return shape(node)[:-2]


def _make_scales_float(graph: torch.fx.Graph) -> None:
    """Convert int scales to floats.

    In training, Inductor's patterns trace an int as a symbol that Dynamo's guards do not find.
    """
    for op in (aten.mul.Tensor, aten.div.Tensor):
        for node in graph.find_nodes(op="call_function", target=op):
            if type(node.args[1]) is int and dtype(node.args[0]).is_floating_point:
                node.update_arg(1, float(node.args[1]))
