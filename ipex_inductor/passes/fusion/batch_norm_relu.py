"""Fuse a batch norm and its ReLU into the 1 x 1 convolution behind them, where that was chosen.

The pass is for inference on a GPU. A concatenation that the batch norm reads is fused too. Without
a choice the graph stays as it is.
"""

import operator
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import torch

from ipex_inductor.ops.conv.conv import ConvArgs
from ipex_inductor.passes.engine.source import user_line
from ipex_inductor.passes.engine.whole_ops import Table, inline
from ipex_inductor.passes.fusion.joined import SYCL, Choose, is_of_pixels, replace_if_chosen
from ipex_inductor.passes.layout.folding import NORM
from ipex_inductor.reporting.decisions import GraphReport

Node = torch.fx.Node
aten = torch.ops.aten

NAME = "batch_norm+relu|conv"
CONVOLUTIONS = (aten.convolution.default, torch.ops.ipex.conv.default)


@dataclass(frozen=True)
class _Match:
    """The parts whose concatenation `norm` reads, and nodes with no other reader, last first."""

    parts: list[Node]
    norm: Node
    between: list[Node]


def place(
    graph: torch.fx.Graph,
    choose: Choose,
    weights: Container[Node],
    table: Table,
    report: GraphReport,
) -> None:
    """Replace each such convolution, with its batch norm and ReLU, by one call if that was chosen.

    Args:
        graph: The inference graph, changed in place.
        choose: Returns the chosen call for a node, with the kind and the reason of the decision.
        weights: Nodes that do not change from call to call.
        table: Decompositions for the chosen calls.
        report: Gets the decisions.
    """
    traced: dict[Any, torch.fx.GraphModule] = {}  # a model repeats its layers
    for target in CONVOLUTIONS:
        for node in graph.find_nodes(op="call_function", target=target):
            match = _match(node, weights)
            if match is None:
                continue
            args = _arguments(node, match)
            call = torch.ops.ipex.conv_preactivated.default, args
            replacement = replace_if_chosen(
                graph, node, call, choose, report, NAME, user_line(node)
            )
            if replacement is None:
                continue
            for unused in (node, *match.between):
                graph.erase_node(unused)
            inline(graph, *replacement, table, traced, origins=True, restrides=False)


def _arguments(node: Node, match: _Match) -> tuple[Any, ...]:
    _, weight, bias, *_ = node.args
    epilogue: Any = ("none", [])
    if node.target is not aten.convolution.default:
        epilogue = ConvArgs.of(node).epilogue()[1:]
    *stats, _, epsilon = match.norm.args[1:]
    x, *more = match.parts
    return (x, weight, bias, *stats, epsilon, more, *epilogue)


def _match(node: Node, weights: Container[Node]) -> _Match | None:
    """Return the operands of a GPU's 1 x 1 convolution, if it is their only reader; else None."""
    image, weight, *_ = node.args
    plain = node.target is aten.convolution.default
    call = None if plain else ConvArgs.of(node)
    window = call.window() if call else node.args[3:9]
    if node.meta["val"].device.type in ("cpu", SYCL) or (call and call.binary != "none"):
        return None
    stride: Any = window[0]
    if not is_of_pixels(weight, window) or {*stride} != {1}:
        return None
    relu = _alone(image, aten.relu.default)
    normed = _alone(relu.args[0], operator.getitem) if relu else None
    norm: Any = normed.args[0] if normed else None
    if not relu or not normed or norm.target is not NORM or len(norm.users) != 1:
        return None
    if normed.args[1] != 0 or not _is_plain(norm, weights):
        return None
    between = [relu, normed, norm]
    whole: Any = norm.args[0]
    if side_by_side := _alone(whole, aten.cat.default):
        parts: Any = side_by_side.args[0]
        if side_by_side.args[1:] in ((1,), (-3,)) and _are_images(parts, whole):
            return _Match([*parts], norm, [*between, whole])
    if (
        copy := _alone(whole, aten.clone.default)
    ) and not copy.kwargs:  # a concatenation of one part
        return _Match([*copy.all_input_nodes], norm, [*between, copy])
    return _Match([whole], norm, between)


def _alone(node: Any, target: Any) -> Node | None:
    """Return `node` if it calls `target` and has one reader, else None."""
    matches = isinstance(node, Node) and node.target is target and len(node.users) == 1
    return node if matches else None


def _is_plain(norm: Node, weights: Container[Node]) -> bool:
    """Return whether the image has one dtype and static sizes, and all else is a weight."""
    image: Any = norm.args[0]
    before, after = image.meta["val"], norm.meta["val"][0]
    is_static = before.dim() == 4 and all(isinstance(size, int) for size in before.shape)
    parameters = (n for n in norm.args[1:5] if n is not None)
    return is_static and before.dtype == after.dtype and all(n in weights for n in parameters)


def _are_images(parts: Any, whole: Node) -> bool:
    """Return whether the parts have the dtype and rank of `whole`, which `cat` does not require."""
    values = [part.meta["val"] for part in parts]
    value = whole.meta["val"]
    return all(v.dim() == value.dim() and v.dtype == value.dtype for v in values)
