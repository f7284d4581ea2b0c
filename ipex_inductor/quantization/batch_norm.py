"""Batch-norm folding in a captured graph: weights are computed from the parameters at each call.

    layer(x, w, b) * factor + shift == layer(x, w * factor, b * factor + shift)

with `factor = gamma / sqrt(var + eps)` and `shift = beta - mean * factor`. Parameters stay in
floating point and in their places, so a parameter that changes counts at the next call.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from ipex_inductor.quantization.capture import LAYER, tensor_type
from ipex_inductor.quantization.operators import WEIGHTED, is_constant, readers

aten = torch.ops.aten
BATCH_NORM = aten.batch_norm.default
TRANSPOSED = {target for target, (_, axis) in WEIGHTED.items() if axis == 1} - {aten.addmm.default}


@dataclass(frozen=True)
class Fold:
    """A batch norm, the layer it was folded into, or why it was not."""

    name: str
    module_path: str
    layer: str
    reason: str = ""


def fold_batch_norms(graph: Graph) -> list[Fold]:
    """Fold each batch norm into the layer before it where that is exact; return what was done."""
    return [_fold(node) for node in graph.find_nodes(op="call_function", target=BATCH_NORM)]


def _fold(norm: Node) -> Fold:
    where = norm.meta[LAYER]
    reason = _find_obstacle(norm)
    if reason:
        return Fold(where.name, where.module_path, "", reason)
    layer: Any = norm.args[0]
    _compute_weights(layer, norm)
    norm.replace_all_uses_with(layer)
    norm.graph.erase_node(norm)
    return Fold(where.name, where.module_path, layer.meta[LAYER].name)


def _find_obstacle(norm: Node) -> str:
    """Return why a batch norm cannot be folded, "" if it can."""
    layer: Any = norm.args[0]
    if norm.args[5]:
        return "it normalizes by the statistics of the batch"
    if not isinstance(layer, Node) or layer.target not in WEIGHTED or not _has_norm_axis(layer):
        return "no convolution or linear layer is right before it"
    if len(readers(layer)) > 1:
        return "the output of the layer before it has other users"
    tensors = [*layer.args[1:3], *norm.args[1:5]]
    if not all(is_constant(t) for t in tensors if isinstance(t, Node)):
        return "its weights are computed from inputs"
    if any(t in _nodes_after(layer) for t in tensors if isinstance(t, Node)):
        return "its weights are computed after the layer before it"
    return ""


def _nodes_after(node: Node) -> set[Node]:
    """Return the nodes that run after a node."""
    order = list(node.graph.nodes)
    return set(order[order.index(node) :])


def _has_norm_axis(layer: Node) -> bool:
    """Return whether dimension 1, which batch norms normalize, is that of output channels."""
    operator = layer.meta[LAYER].operator
    value = layer.meta.get("val")
    if operator == "linear":
        return value is not None and value.dim() == 2
    return operator.startswith("conv") and value is not None and value.dim() > 2


def _compute_weights(layer: Node, norm: Node) -> None:
    """Give the layer the weight and the bias of both."""
    arguments: list[Any] = [*layer.args, *[None] * (3 - len(layer.args))]
    x, weight, bias, *others = arguments
    gamma, beta, mean, variance = norm.args[1:5]
    graph, call = layer.graph, layer.graph.call_function
    with graph.inserting_before(layer):
        factor = call(aten.rsqrt.default, (call(aten.add.Tensor, (variance, norm.args[7])),))
        if gamma is not None:
            factor = call(aten.mul.Tensor, (factor, gamma))
        shifted = call(aten.sub.Tensor, (bias, mean)) if bias is not None else None
        if shifted is None:
            shifted = call(aten.neg.default, (mean,))
        new_bias = call(aten.mul.Tensor, (shifted, factor))
        if beta is not None:
            new_bias = call(aten.add.Tensor, (new_bias, beta))
        new_weight = _scale_weight(layer, weight, factor)
        dtype = tensor_type(weight) if isinstance(weight, Node) else None
        if dtype not in (None, torch.float32):
            new_weight, new_bias = (call(aten.to.dtype, (t, dtype)) for t in (new_weight, new_bias))
    new_weight.meta["val"] = weight.meta["val"]
    layer.args = (x, new_weight, new_bias, *others)


def _scale_weight(layer: Node, weight: Any, factor: Node) -> Node:
    """Return the weight times one factor for each output channel."""
    call = layer.graph.call_function
    window = weight.meta["val"].dim() - 2
    if layer.target not in TRANSPOSED:
        table = call(aten.reshape.default, (factor, [-1, 1, *[1] * window]))
        return call(aten.mul.Tensor, (weight, table))
    groups: Any = layer.args[6] if len(layer.args) > 6 else 1
    rows, columns, *sizes = weight.meta["val"].shape  # inputs, outputs of one group
    grouped = call(aten.reshape.default, (weight, [groups, rows // groups, columns, *sizes]))
    table = call(aten.reshape.default, (factor, [groups, 1, columns, *[1] * window]))
    product = call(aten.mul.Tensor, (grouped, table))
    return call(aten.reshape.default, (product, [rows, columns, *sizes]))
