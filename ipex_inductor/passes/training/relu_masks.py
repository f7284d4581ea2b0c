"""Compute the gradient of a ReLU behind a batch norm in training on a GPU without a mask in memory.

    where(relu(norm(x)) <= 0, 0, gradient) => relu_norm_gradient(gradient, x, ...)

Inductor keeps the mask from the forward, or reads it off the ReLU's result, in both kernels of the
norm's backward: the sums, and their use. Both kernels read x anyway, which determines the mask.
Apart from the bias, the norm's own backward reads all that is needed; a bias may be written to
meanwhile, so the forward's value is saved.
"""

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch._dynamo.utils import counters

import ipex_inductor.ops  # noqa: F401  registers ours
from ipex_inductor.passes.engine.rule import is_backward
from ipex_inductor.passes.engine.source import user_line
from ipex_inductor.reporting.decisions import GraphReport

Node = torch.fx.Node
aten, prims = torch.ops.aten, torch.ops.prims

NAME = "relu-mask"
CONVERT = prims.convert_element_type.default
SAME = (aten.alias.default, aten.detach.default)
VIEWS = (aten.view.default, aten.reshape.default, aten.permute.default, aten.alias.default)
PARTIAL = torch.ops.ipex.column_moments.default
MOMENTS = (aten.var_mean.correction, torch.ops.ipex.moments.default)
HALVES = (torch.bfloat16, torch.float16)
DEVICES = ("cuda",)
# How a norm's backward reads the gradient: it sums it, multiplies it by x, and subtracts the means.
READERS = [aten.sum.dim_IntList, aten.mul.Tensor, aten.sub.Tensor]


def rewrite(graph: torch.fx.Graph, report: GraphReport) -> None:
    """Replace gradients of ReLUs that are read by their norm's backward alone."""
    for node in graph.find_nodes(op="call_function", target=aten.where.self):
        normed = _masked_by(node)
        if normed is None or node.meta["val"].device.type not in DEVICES:
            continue
        reason = _why_not(node, normed)
        if reason is None:
            _replace(graph, node, normed)
            counters["ipex"][NAME] += 1
        report.add("missed" if reason else "fired", NAME, reason or "", user_line(node))


def _masked_by(node: Node) -> dict[str, Node] | None:
    """Return the factors of the norm in `where(relu(norm(x)) <= 0, 0, gradient)`, else None."""
    mask, zero, _ = node.args
    if not (isinstance(mask, Node) and mask.target is aten.le.Scalar and mask.args[1] == 0):
        return None
    relu = _through(mask.args[0], SAME)
    if relu.target is not aten.relu.default or not _is_zero(zero):
        return None
    return _find_factors(_before_cast(relu.args[0], narrows=True))


def _find_factors(node: Any) -> dict[str, Node] | None:
    """Return the factors of `(x - mean) * scale * weight + bias`, with moments of x; else None."""
    factors: dict[str, Any] = {}
    for target, name in (
        (aten.add.Tensor, "bias"),
        (aten.mul.Tensor, "weight"),
        (aten.mul.Tensor, "scale"),
        (aten.sub.Tensor, "mean"),
    ):
        if not isinstance(node, Node) or node.target is not target or node.kwargs:
            return None
        node, factors[name] = node.args
    if not all(isinstance(factor, Node) for factor in (node, *factors.values())):
        return None
    x = factors["x"] = _before_cast(node, narrows=False)
    moments = _chain(factors["mean"])[-1], _chain(factors["scale"])[-1]
    has_moments = moments[0].target in MOMENTS and moments[0] is moments[1]
    return factors if has_moments and _find_image(moments[0]) is x else None


def _before_cast(node: Node, narrows: bool) -> Node:
    """Return what `node` was cast from between fp32 and 16 bits, or `node`."""
    if node.target is not CONVERT:
        return node
    (source, dtype) = node.args
    assert isinstance(source, Node)
    result_dtype, source_dtype = dtype, source.meta["val"].dtype
    wide, narrow = (source_dtype, result_dtype) if narrows else (result_dtype, source_dtype)
    return source if wide is torch.float32 and narrow in HALVES else node


def _chain(node: Node) -> list[Node]:
    """Return a node and its chain of single inputs, up to moments or an input."""
    chain = [node]
    while chain[-1].target not in MOMENTS and len(chain[-1].all_input_nodes) == 1:
        chain += chain[-1].all_input_nodes
    return chain


def _find_image(moments: Node) -> Node:
    """Return the activation that moments are computed from."""
    source = _through(moments.all_input_nodes[0], (PARTIAL, *VIEWS))
    image: Node = _before_cast(source, narrows=False)
    return image


def _is_zero(value: object) -> bool:
    if not isinstance(value, Node):
        return value == 0
    value_index: dict[Any, int] = {aten.scalar_tensor.default: 0, aten.full.default: 1}
    scalar = value_index.get(value.target)
    return scalar is not None and bool(value.args[scalar] == 0)


def _through(node: Any, targets: tuple[object, ...]) -> Any:
    while isinstance(node, Node) and node.target in targets:
        node = node.args[0]
    return node


def _why_not(node: Node, normed: Mapping[str, Node]) -> str | None:
    gradient, x = node.args[2], normed["x"]
    assert isinstance(gradient, Node)
    value, image = gradient.meta["val"], x.meta["val"]
    if (value.dtype, value.shape) != (image.dtype, image.shape):
        return "its gradient and the normalized tensor differ in dtype or shape"
    channels = image.shape[1] if image.dim() > 1 else 1
    shapes = [n.meta["val"].shape for name, n in normed.items() if name != "x"]
    sizes = [channels, *itertools.chain(*shapes)]
    if not all(isinstance(size, int) for size in sizes):
        return "its channels vary"
    if {*sizes} - {1, channels}:
        return "it is not normalized by channel"
    if _is_fused(gradient) or _is_fused(x):
        return "it would be computed twice"
    if not any(is_backward(user) for link in _chain(normed["weight"]) for user in link.users):
        return "the norm's backward does not read its weight"
    if sorted(str(n.target) for n in _readers(node)) != sorted(map(str, READERS)):
        return "the norm's backward is not its only reader"
    return None


def _is_fused(node: Node) -> bool:
    """Return whether Inductor may compute a node inside its readers."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags or node.target is CONVERT


def _readers(node: Node) -> dict[Node, Node]:
    """Return the readers of a node with what they read: the node itself, or it in fp32."""
    readers: dict[Node, Node] = {}
    for user in node.users:
        readers |= _readers(user) if user.target is CONVERT else {user: node}
    return readers


def _replace(graph: torch.fx.Graph, node: Node, normed: Mapping[str, Node]) -> None:
    """Insert a separate call for each reader."""
    gradient = node.args[2]
    normed = {**normed, "bias": _copy_bias(graph, normed["bias"])}
    factors = [normed[name] for name in ("x", "mean", "scale", "weight", "bias")]
    for number, (user, read) in enumerate(_readers(node).items()):
        with graph.inserting_before(user):
            args = (gradient, *factors, number)
            ours = graph.call_function(torch.ops.ipex.relu_norm_gradient.default, args)
            ours.meta = dict(node.meta)
            if read is not node:
                ours = graph.call_function(CONVERT, (ours, *read.args[1:]))
                ours.meta = dict(read.meta)
        user.replace_input_with(read, ours)


def _copy_bias(graph: torch.fx.Graph, bias: Node) -> Node:
    """Return a copy of the bias, which the norm then adds too.

    A copy that the forward did not need would be computed in the backward.
    """
    adds = [user for user in bias.users if user.target is aten.add.Tensor]
    with graph.inserting_before(adds[0]):
        copy = graph.call_function(torch.ops.ipex.kept.default, (bias,))
    copy.meta = {name: bias.meta[name] for name in ("val", "partitioner_tag") if name in bias.meta}
    for user in adds:
        user.replace_input_with(bias, copy)
    return copy
