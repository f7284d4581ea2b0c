"""A batch norm and its relu in the convolution of one pixel behind them, where that was chosen.

On a GPU, in inference; with the images that they read side by side, if they do. Else the graph
stays as it is.
"""

import operator
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import torch

from ipex_inductor.passes.engine.source import user_line
from ipex_inductor.passes.engine.whole_ops import Table, inline
from ipex_inductor.passes.fusion.joined import SYCL, Choose, is_of_pixels, together
from ipex_inductor.passes.layout.folding import NORM
from ipex_inductor.reporting.decisions import GraphReport

Node = torch.fx.Node
aten = torch.ops.aten

NAME = "batch_norm+relu|conv"
CONVOLUTIONS = (aten.convolution.default, torch.ops.ipex.conv.default)


@dataclass(frozen=True)
class _Found:
    """The parts that `norm` reads side by side, and nodes that nobody else needs, last first."""

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
    """Replace each such convolution with what it reads by one call, if that was chosen.

    `table`: what calls are decomposed by. `weights` are known not to change from call to call.
    """
    traced: dict[Any, torch.fx.GraphModule] = {}  # a model repeats its layers
    for target in CONVOLUTIONS:
        for node in graph.find_nodes(op="call_function", target=target):
            found = _found(node, weights)
            if found is None:
                continue
            args = _arguments(node, found)
            asked = torch.ops.ipex.conv_preactivated.default, args
            made = together(graph, node, asked, choose, report, NAME, user_line(node))
            if made is None:
                continue
            for each in (node, *found.between):
                graph.erase_node(each)
            inline(graph, *made, table, traced, origins=True, restrides=False)


def _arguments(node: Node, found: _Found) -> tuple[Any, ...]:
    _, weight, bias, *_ = node.args
    words: Any = ("none", []) if node.target is aten.convolution.default else node.args[11:13]
    *stats, _, epsilon = found.norm.args[1:]
    x, *more = found.parts
    return (x, weight, bias, *stats, epsilon, more, *words)


def _found(node: Node, weights: Container[Node]) -> _Found | None:
    """What a GPU's convolution of one pixel reads, if it alone reads that."""
    image, weight, *_ = node.args
    plain = node.target is aten.convolution.default
    window = node.args[3:9] if plain else node.args[4:10]
    if node.meta["val"].device.type in ("cpu", SYCL) or not (plain or node.args[10] == "none"):
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
            return _Found([*parts], norm, [*between, whole])
    if (copy := _alone(whole, aten.clone.default)) and not copy.kwargs:  # one, side by side
        return _Found([*copy.all_input_nodes], norm, [*between, copy])
    return _Found([whole], norm, between)


def _alone(node: Any, target: Any) -> Node | None:
    """`node` if it calls `target` and one other reads it."""
    found = isinstance(node, Node) and node.target is target and len(node.users) == 1
    return node if found else None


def _is_plain(norm: Node, weights: Container[Node]) -> bool:
    """Whether its image stays of one dtype and of known sizes, and all else is a weight."""
    image: Any = norm.args[0]
    before, after = image.meta["val"], norm.meta["val"][0]
    known = before.dim() == 4 and all(isinstance(size, int) for size in before.shape)
    own = (n for n in norm.args[1:5] if n is not None)
    return known and before.dtype == after.dtype and all(n in weights for n in own)


def _are_images(parts: Any, whole: Node) -> bool:
    """Whether they are of its dtype and dimensions, which `cat` does not ask of what is empty."""
    values = [part.meta["val"] for part in parts]
    value = whole.meta["val"]
    return all(v.dim() == value.dim() and v.dtype == value.dtype for v in values)
