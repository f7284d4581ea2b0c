"""Convolve by 1x1 before upsampling instead of after it.

    conv1x1(cat([x, up(a), up(b)])) => conv1x1(x) + up(conv1x1(a)) + up(conv1x1(b))

Interpolation mixes pixels, and a 1x1 convolution mixes channels, so their order does not matter.
Heads for segmentation (SegFormer) and detection upsample several levels, concatenate them and
reduce their channels: most products are then of copied pixels, and the concatenation is written
and read in full. Each side rounds once to the dtype of the graph, at other places.
"""

import math
from collections.abc import Callable, Container
from typing import Any

import torch
from torch._dynamo.utils import counters

from ipex_inductor.passes.engine.source import user_line
from ipex_inductor.passes.engine.whole_ops import (
    compute_value,
    lies_alike,
    list_restriding_calls,
)
from ipex_inductor.reporting.decisions import GraphReport

Node = torch.fx.Node
aten, prims = torch.ops.aten, torch.ops.prims

NAME = "conv|upsample"
DEVICES = ("cpu", "cuda")
LEAST_GROWTH = 4  # pixels of the largest upsampling for each of its source

# Ops that are linear in each operand of an image, and act on all channels alike.
PICKS = (aten._unsafe_index.Tensor, aten.index.Tensor)
SUMS = (aten.add.Tensor, aten.sub.Tensor)
COPY = aten.clone.default
CASTS = (prims.convert_element_type.default,)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def commute(graph: torch.fx.Graph, weights: Container[Node], report: GraphReport) -> None:
    """Move every 1x1 convolution of an upsampled image before the upsampling, in place.

    Args:
        graph: A graph of inference.
        weights: Nodes that hold weights, of which parts are taken beforehand.
        report: Gets the decisions.
    """
    for node in graph.find_nodes(op="call_function", target=aten.convolution.default):
        if node.meta["val"].device.type not in DEVICES or not _is_pointwise(node):
            continue
        parts = _read_parts(node)
        chains = [find_upsampling(part) for part in parts]
        if max((chain.growth for chain in chains if chain), default=0) < LEAST_GROWTH:
            continue
        reason = _why_not(node, parts, chains, weights)
        report.add("missed" if reason else "fired", NAME, reason or "", user_line(node))
        if reason is None:
            counters["ipex"][NAME] += 1
            _Commuting(graph, node).replace(parts, chains)
    graph.eliminate_dead_code()


class Upsampling:
    """Nodes that compute an image from a smaller one, in order.

    Args:
        source: The smaller image.
        nodes: The nodes, of which the last is the larger image.
    """

    def __init__(self, source: Node, nodes: list[Node]) -> None:
        self.source, self.nodes = source, nodes

    @property
    def growth(self) -> float:
        """The pixels of the image for each of its source."""
        large, small = (math.prod(_sizes(node)[2:4]) for node in (self.nodes[-1], self.source))
        return float(large / small)

    @property
    def picks(self) -> int:
        """The pixels of the source that each pixel of the image is computed from."""
        return sum(node.target in PICKS for node in self.nodes)


def find_upsampling(image: Node) -> Upsampling | None:
    """Return how an image [N, C, H, W] is interpolated from one that is not larger, or None.

    Interpolation is known by what it computes: weighted sums of pixels that are picked by indices,
    whose weights are equal for all channels. So every mode of it is found, as decomposed.
    """
    nodes: dict[Node, None] = {}
    source = _trace_back(image, nodes)
    if source is None or not nodes:
        return None
    if not all(
        isinstance(size, int) and size for size in (*_sizes(source)[1:], *_sizes(image)[1:])
    ):
        return None
    upsampling = Upsampling(source, [*nodes])
    return upsampling if upsampling.growth >= 1 else None


def _sizes(node: Node) -> Any:
    return node.meta["val"].shape


def _trace_back(node: Any, nodes: dict[Node, None]) -> Node | None:
    """Return the image whose pixels a node mixes, and add the nodes between, operands first."""
    if not isinstance(node, Node) or node.op != "call_function":
        return None
    if node.target in PICKS:
        source = _read_picked(node, nodes)
    elif node.target in CASTS:
        source = _trace_back(node.args[0], nodes) if _is_float(node) else None
    elif node.target is COPY:
        source = _trace_back(node.args[0], nodes)
    elif node.target in SUMS and not node.kwargs:
        sources = {_trace_back(operand, nodes) for operand in node.args}
        source = sources.pop() if len(sources) == 1 else None
    elif node.target is aten.mul.Tensor:
        source = _trace_weighted(node, nodes)
    else:
        source = None
    if source is not None:
        nodes[node] = None
    return source


def _read_picked(node: Node, nodes: dict[Node, None]) -> Node | None:
    """Return the image of which a node picks rows and columns, before it is cast."""
    image: Any
    indices: Any
    image, indices = node.args
    if len(indices) != 4 or indices[0] is not None or indices[1] is not None:
        return None
    if image.target in CASTS and _is_float(image):
        nodes[image] = None
        return image.args[0]  # type: ignore[no-any-return]
    return image  # type: ignore[no-any-return]


def _trace_weighted(node: Node, nodes: dict[Node, None]) -> Node | None:
    """Return the source of a product of an image with factors that are equal for all channels."""
    for image, factor in (node.args, node.args[::-1]):
        is_plain = not isinstance(factor, Node) or factor.meta["val"].dim() <= 2
        source = _trace_back(image, nodes) if is_plain else None
        if source is not None:
            return source
    return None


def _is_float(node: Node) -> bool:
    return node.meta["val"].dtype in FLOATS and node.args[0].meta["val"].dtype in FLOATS  # type: ignore[union-attr]


def _is_pointwise(node: Node) -> bool:
    """Return whether a node is a dense 1x1 convolution of images."""
    args: Any = node.args
    _, weight, _, stride, padding, _, transposed, _, groups = args
    is_dense = not transposed and groups == 1
    window = [*weight.meta["val"].shape[2:]]
    return is_dense and window == [1, 1] == [*stride] and not any(padding)


def _read_parts(node: Node) -> list[Node]:
    """Return the images whose channels a convolution reads side by side."""
    x: Any = node.args[0]
    if x.target is not aten.cat.default or len(x.users) > 1:
        return [x]
    parts, dim = _read_cat(*x.args, **x.kwargs)
    return [*parts] if dim in (1, -3) else [x]


def _read_cat(tensors: Any, dim: int = 0) -> tuple[Any, int]:
    return tensors, dim


def is_on_cpu(node: Node) -> bool:
    """Return whether the result of a node is on a CPU."""
    return bool(node.meta["val"].device.type == "cpu")


def _why_not(
    node: Node, parts: list[Node], chains: list[Upsampling | None], weights: Container[Node]
) -> str | None:
    """Return why a convolution of upsampled parts is not moved, or None."""
    value = node.meta["val"]
    images = [chain.source if chain else part for part, chain in zip(parts, chains, strict=True)]
    if is_on_cpu(node) and any(chain.picks > 1 for chain in chains if chain):
        return "on a CPU a sum of interpolated images takes longer than is saved"
    if node.args[1] not in weights:
        return "its weight is no parameter"
    if value.dtype not in FLOATS or any(x.meta["val"].dtype != value.dtype for x in images):
        return "its parts are of other dtypes"
    if not all(isinstance(image.meta["val"].shape[1], int) for image in images):
        return "its channels vary"
    channels = sum(image.meta["val"].shape[1] for image in images)
    if value.shape[1] > channels:
        return "it returns more channels than it reads, which would be upsampled instead"
    return None


class _Commuting:
    """The rewrite of one convolution."""

    def __init__(self, graph: torch.fx.Graph, node: Node) -> None:
        self.graph, self.node = graph, node
        self.added: list[Node] = []

    def replace(self, parts: list[Node], chains: list[Upsampling | None]) -> None:
        """Replace the convolution by a sum of convolutions of its parts."""
        ends, end = [], 0
        for part in parts:
            ends.append((end, end := end + part.meta["val"].shape[1]))
        plain = [
            (part, span) for part, span, chain in zip(parts, ends, chains, strict=True) if not chain
        ]
        _, _, bias, *window = self.node.args
        with self.graph.inserting_before(self.node):
            terms = []
            if plain:
                image = plain[0][0]
                if len(plain) > 1:
                    image = self._call(aten.cat.default, [part for part, _ in plain], 1)
                weight = self._weight([span for _, span in plain])
                terms.append(self._call(aten.convolution.default, image, weight, bias, *window))
                bias = None
            for span, chain in zip(ends, chains, strict=True):
                if chain:
                    weight = self._weight([span])
                    small = self._call(
                        aten.convolution.default, chain.source, weight, bias, *window
                    )
                    bias = None
                    terms.append(self._repeat(chain, small))
            result = terms[0]
            for term in terms[1:]:
                result = self._call(aten.add.Tensor, result, term)
            result = self._restrided(result)
        for node in self.added:
            node.meta = {**self.node.meta, "val": node.meta["val"]}
        self.node.replace_all_uses_with(result)
        self.graph.erase_node(self.node)

    def _weight(self, spans: list[tuple[int, int]]) -> Node:
        """Return the columns of the weight for some channels."""
        weight = self.node.args[1]
        columns = [self._call(aten.slice.Tensor, weight, 1, *span) for span in spans]
        return self._call(aten.cat.default, columns, 1)

    def _repeat(self, chain: Upsampling, small: Node) -> Node:
        """Return the nodes of an upsampling again, of another image and without copies."""
        copies: dict[Node, Node] = {chain.source: small}
        for node in chain.nodes:
            args: Any = torch.fx.map_arg(node.args, lambda n: copies.get(n, n))
            is_copy = node.target is COPY
            copies[node] = args[0] if is_copy else self._call(node.target, *args, **node.kwargs)
        return copies[chain.nodes[-1]]

    def _restrided(self, result: Node) -> Node:
        """Return the result with the strides that readers of the convolution rely on."""
        promised = self.node.meta["val"]
        if lies_alike(result.meta["val"], promised):
            return result
        for op, args, kwargs in list_restriding_calls(promised):
            result = self._call(op, result, *args, **kwargs)
        return result

    def _call(self, op: Callable[..., Any] | Any, *args: Any, **kwargs: Any) -> Node:
        node = self.graph.call_function(op, args, kwargs)
        node.meta["val"] = compute_value(node)
        self.added.append(node)
        return node
