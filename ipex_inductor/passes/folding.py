"""Batch norm in inference folded into the convolution or linear layer before it.

The folded weight is work on weights alone, so the prologue computes it: in float64, rounded once.
`batch_norm(conv(x, w, b)) = conv(x, w * s, (b - mean) * s + beta)`, `s = gamma / sqrt(var + eps)`
(torch.nn.utils.fusion.fuse_conv_bn_eval computes the same in the weight's dtype).
"""

from collections.abc import Container
from typing import Any

import torch
from torch._dynamo.utils import counters
from torch._inductor.virtualized import V

from ipex_inductor.report import GraphReport

Node = torch.fx.Node
aten = torch.ops.aten

NAME = "conv2d+batch_norm"


def fold_batch_norms(graph: torch.fx.Graph, weights: Container[Node], report: GraphReport) -> None:
    """Fold every batch norm of `graph` for which that is proven right; say why for the others."""
    for norm in graph.find_nodes(
        op="call_function", target=aten._native_batch_norm_legit_no_training.default
    ):
        reason = _why_not(norm, weights)
        if reason:
            report.add("missed", NAME, reason)
            continue
        _fold(graph, norm)
        report.add("fired", NAME)
        counters["ipex"][NAME] += 1


def _why_not(norm: Node, weights: Container[Node]) -> str | None:
    product, *statistics = norm.args[:5]
    if not isinstance(product, Node) or product.target is not aten.convolution.default:
        return "what it normalises is not the result of a convolution"
    if len(product.users) > 1:
        return f"the convolution's result has {len(product.users)} users"
    if product.args[6]:
        return "the convolution is transposed"
    own = [n for n in (*product.args[1:3], *statistics) if n is not None]
    if not all(n in weights for n in own):
        return "a weight, bias or statistic is not a parameter or buffer"
    if not all(n.meta["val"].is_floating_point() for n in own):  # type: ignore[union-attr]
        return "a weight is not of a floating-point type"
    if any(user.args[1] != 0 for user in norm.users):
        return "its saved statistics are used"
    if product.meta["val"].dtype != norm.meta["val"][0].dtype:
        return "it changes the dtype"
    return None


def _fold(graph: torch.fx.Graph, norm: Node) -> None:
    product, gamma, beta, mean, variance, _, epsilon = norm.args
    assert isinstance(product, Node)
    x, weight, bias, *window = product.args
    build = _Builder(graph, product)
    scale = build(aten.rsqrt.default, build(aten.add.Tensor, build.double(variance), epsilon))
    if gamma is not None:
        scale = build(aten.mul.Tensor, scale, build.double(gamma))
    shape = [-1] + [1] * (weight.meta["val"].dim() - 1)  # type: ignore[union-attr]
    wide = build(aten.view.default, scale, shape)
    folded = build(aten.mul.Tensor, build.double(weight), wide)
    shift = build(aten.neg.default, build.double(mean))
    if bias is not None:
        shift = build(aten.add.Tensor, shift, build.double(bias))
    shift = build(aten.mul.Tensor, shift, scale)
    if beta is not None:
        shift = build(aten.add.Tensor, shift, build.double(beta))
    dtype = weight.meta["val"].dtype  # type: ignore[union-attr]
    product.args = (x, build.cast(folded, dtype), build.cast(shift, dtype), *window)
    for user in list(norm.users):
        user.replace_all_uses_with(product)
        graph.erase_node(user)
    product.meta = {**norm.meta, "val": product.meta["val"]}
    graph.erase_node(norm)


class _Builder:
    """Adds nodes before `place`, with their fake values."""

    def __init__(self, graph: torch.fx.Graph, place: Node) -> None:
        self._graph, self._place = graph, place

    def __call__(self, op: Any, *args: Any) -> Node:
        """The node `op(*args)`."""
        with self._graph.inserting_before(self._place):
            node = self._graph.call_function(op, args)
        values = torch.fx.map_arg(args, lambda n: n.meta["val"])
        with V.fake_mode:
            node.meta["val"] = op(*values)
        return node

    def cast(self, node: Any, dtype: torch.dtype) -> Node:
        """`node` in another dtype."""
        return self(torch.ops.prims.convert_element_type.default, node, dtype)

    def double(self, node: Any) -> Node:
        """`node` in float64."""
        return self.cast(node, torch.float64)
