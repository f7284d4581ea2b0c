"""The gradient of a ReLU behind a batch norm in training on a GPU, without a mask in memory.

    where(relu(norm(x)) <= 0, 0, gradient) => relu_norm_gradient(gradient, x, ...)

What lets a gradient through is kept by the forward as a mask, or read off the ReLU's result, by
both kernels of the norm's backward, sums and what they are put into. Both read x anyway, which says
the same. But for its bias the backward reads what the norm's own does; a bias may be written to
meanwhile, so the forward's is kept.
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
# What a norm's backward does with the gradient: sums it, also times x, and takes those off it.
READERS = [aten.sum.dim_IntList, aten.mul.Tensor, aten.sub.Tensor]


def rewrite(graph: torch.fx.Graph, report: GraphReport) -> None:
    """Replace gradients of ReLUs whose norm's backward is all that reads them."""
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
    """The factors of the norm in `where(relu(norm(x)) <= 0, 0, gradient)`, None for all else."""
    mask, zero, _ = node.args
    if not (isinstance(mask, Node) and mask.target is aten.le.Scalar and mask.args[1] == 0):
        return None
    relu = _through(mask.args[0], SAME)
    if relu.target is not aten.relu.default or not _is_zero(zero):
        return None
    return _normed(_before_cast(relu.args[0], narrows=True))


def _normed(node: Any) -> dict[str, Node] | None:
    """The factors of `(x - mean) * scale * weight + bias` where x is normed by its own moments."""
    found: dict[str, Any] = {}
    for target, name in (
        (aten.add.Tensor, "bias"),
        (aten.mul.Tensor, "weight"),
        (aten.mul.Tensor, "scale"),
        (aten.sub.Tensor, "mean"),
    ):
        if not isinstance(node, Node) or node.target is not target or node.kwargs:
            return None
        node, found[name] = node.args
    if not all(isinstance(each, Node) for each in (node, *found.values())):
        return None
    x = found["x"] = _before_cast(node, narrows=False)
    moments = _chain(found["mean"])[-1], _chain(found["scale"])[-1]
    known = moments[0].target in MOMENTS and moments[0] is moments[1]
    return found if known and _measured(moments[0]) is x else None


def _before_cast(node: Node, narrows: bool) -> Node:
    """What `node` was cast from, if it is fp32 cast to 16 bits, or the other way round."""
    if node.target is not CONVERT:
        return node
    (source, dtype) = node.args
    assert isinstance(source, Node)
    made, given = dtype, source.meta["val"].dtype
    wide, narrow = (given, made) if narrows else (made, given)
    return source if wide is torch.float32 and narrow in HALVES else node


def _chain(node: Node) -> list[Node]:
    """The node, and what it alone is computed of, step by step, up to moments or an input."""
    found = [node]
    while found[-1].target not in MOMENTS and len(found[-1].all_input_nodes) == 1:
        found += found[-1].all_input_nodes
    return found


def _measured(moments: Node) -> Node:
    """The image that moments are of."""
    source = _through(moments.all_input_nodes[0], (PARTIAL, *VIEWS))
    found: Node = _before_cast(source, narrows=False)
    return found


def _is_zero(value: object) -> bool:
    if not isinstance(value, Node):
        return value == 0
    places: dict[Any, int] = {aten.scalar_tensor.default: 0, aten.full.default: 1}
    scalar = places.get(value.target)
    return scalar is not None and bool(value.args[scalar] == 0)


def _through(node: Any, targets: tuple[object, ...]) -> Any:
    while isinstance(node, Node) and node.target in targets:
        node = node.args[0]
    return node


def _why_not(node: Node, normed: Mapping[str, Node]) -> str | None:
    gradient, x = node.args[2], normed["x"]
    assert isinstance(gradient, Node)
    value, given = gradient.meta["val"], x.meta["val"]
    if (value.dtype, value.shape) != (given.dtype, given.shape):
        return "its gradient and what was normed are not alike"
    channels = given.shape[1] if given.dim() > 1 else 1
    others = [n.meta["val"].shape for name, n in normed.items() if name != "x"]
    sizes = [channels, *itertools.chain(*others)]
    if not all(isinstance(size, int) for size in sizes):
        return "its channels vary"
    if {*sizes} - {1, channels}:
        return "what it is normed by is not of channels"
    if _is_fused(gradient) or _is_fused(x):
        return "it would be computed twice"
    if not any(is_backward(user) for each in _chain(normed["weight"]) for user in each.users):
        return "the norm's backward does not read its weight"
    if sorted(str(n.target) for n in _readers(node)) != sorted(map(str, READERS)):
        return "not the norm's backward alone reads it"
    return None


def _is_fused(node: Node) -> bool:
    """Whether whoever reads it may compute it."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags or node.target is CONVERT


def _readers(node: Node) -> dict[Node, Node]:
    """Who reads it, and as what: as it is or in fp32."""
    found: dict[Node, Node] = {}
    for user in node.users:
        found |= _readers(user) if user.target is CONVERT else {user: node}
    return found


def _replace(graph: torch.fx.Graph, node: Node, normed: Mapping[str, Node]) -> None:
    """A call of its own for each reader."""
    gradient = node.args[2]
    normed = {**normed, "bias": _kept(graph, normed["bias"])}
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


def _kept(graph: torch.fx.Graph, bias: Node) -> Node:
    """A copy, which the norm adds too: what the forward does not need the backward would make."""
    adds = [user for user in bias.users if user.target is aten.add.Tensor]
    with graph.inserting_before(adds[0]):
        kept = graph.call_function(torch.ops.ipex.kept.default, (bias,))
    kept.meta = {name: bias.meta[name] for name in ("val", "partitioner_tag") if name in bias.meta}
    for user in adds:
        user.replace_input_with(bias, kept)
    return kept
