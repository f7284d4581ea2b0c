"""Convolve by 1x1 before upsampling instead of after it.

    conv1x1(cat([x, up(a), up(b)])) => conv1x1(x) + up(conv1x1(a)) + up(conv1x1(b))

Interpolation mixes pixels, and a 1x1 convolution mixes channels, so their order does not matter.
Heads for segmentation (SegFormer) and detection upsample several levels, concatenate them and
reduce their channels: most products are then of copied pixels, and the concatenation is written
and read in full. Each side rounds once to the dtype of the graph, at other places.
"""

from collections.abc import Container
from typing import Any

import torch
from torch._dynamo.utils import counters

from ipex_inductor.passes.engine.source import user_line
from ipex_inductor.passes.engine.whole_ops import compute_value, lies_alike, list_restriding_calls
from ipex_inductor.passes.restated.interpolation import COPY, FLOATS, Upsampling, find_upsampling
from ipex_inductor.reporting.decisions import GraphReport

Node = torch.fx.Node
aten = torch.ops.aten

NAME = "conv|upsample"
DEVICES = ("cpu", "cuda")
LEAST_GROWTH = 4  # pixels of the largest upsampling for each of its source


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
        if not _has_gain(node, chains):
            continue
        reason = _why_not(node, parts, chains, weights)
        report.add("missed" if reason else "fired", NAME, reason or "", user_line(node))
        if reason is None:
            counters["ipex"][NAME] += 1
            _Commuting(graph, node).replace(parts, chains)
    graph.eliminate_dead_code()


def is_on_cpu(node: Node) -> bool:
    """Return whether the result of a node is on a CPU."""
    return bool(node.meta["val"].device.type == "cpu")


def _has_gain(node: Node, chains: list[Upsampling | None]) -> bool:
    """Return whether an image is enlarged enough, by a kind that the device computes well.

    On a CPU a sum of several interpolated images in one loop takes longer than is saved.
    """
    found = [chain for chain in chains if chain]
    growth = max((chain.growth for chain in found), default=0)
    return growth >= LEAST_GROWTH and not (
        is_on_cpu(node) and any(chain.picks > 1 for chain in found)
    )


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


def _why_not(
    node: Node, parts: list[Node], chains: list[Upsampling | None], weights: Container[Node]
) -> str | None:
    """Return why a convolution of upsampled parts is not moved, or None."""
    value = node.meta["val"]
    if node.args[1] not in weights:
        return "its weight is no parameter"
    images = [chain.source if chain else part for part, chain in zip(parts, chains, strict=True)]
    if value.dtype not in FLOATS or any(x.meta["val"].dtype != value.dtype for x in images):
        return "its parts are of other dtypes"
    if not all(isinstance(image.meta["val"].shape[1], int) for image in images):
        return "its channels vary"
    upsampled = [chain for part, chain in zip(parts, chains, strict=True) if chain]
    if any(len(chain.nodes[-1].users) > 1 for chain in upsampled):
        return "an upsampled image has other readers, which need it anyway"
    if value.shape[1] > sum(chain.source.meta["val"].shape[1] for chain in upsampled):
        return "it returns more channels than are upsampled, which would be upsampled instead"
    return None


class _Commuting:
    """The rewrite of one convolution."""

    def __init__(self, graph: torch.fx.Graph, node: Node) -> None:
        self.graph, self.node = graph, node
        self.added: list[Node] = []

    def replace(self, parts: list[Node], chains: list[Upsampling | None]) -> None:
        """Replace the convolution by a sum of convolutions of its parts."""
        with self.graph.inserting_before(self.node):
            result = self._restride(self._sum_parts(parts, chains))
        for node in self.added:
            node.meta = {**self.node.meta, "val": node.meta["val"]}
        self.node.replace_all_uses_with(result)
        self.graph.erase_node(self.node)

    def _sum_parts(self, parts: list[Node], chains: list[Upsampling | None]) -> Node:
        """Return the sum of the convolutions of all parts, with the bias.

        The bias is not upsampled: factors of a sum of pixels need not add up to one.
        """
        ends, end = [], 0
        for part in parts:
            ends.append((end, end := end + part.meta["val"].shape[1]))
        triples = [*zip(parts, ends, chains, strict=True)]
        plain = [(part, span) for part, span, chain in triples if chain is None]
        bias: Any = self.node.args[2]
        terms = [self._convolve_plain(plain, bias)] if plain else []
        for _, span, chain in triples:
            if chain is not None:
                small = self._convolve(chain.source, self._weight([span]), None)
                terms.append(self._repeat(chain, small))
        if bias is not None and not plain:
            terms.append(self._call(aten.view.default, bias, [-1, 1, 1]))
        result = terms[0]
        for term in terms[1:]:
            result = self._call(aten.add.Tensor, result, term)
        return result

    def _convolve_plain(self, plain: list[tuple[Node, tuple[int, int]]], bias: Any) -> Node:
        """Return the convolution of the parts that are not upsampled, side by side."""
        images = [part for part, _ in plain]
        image = images[0] if len(images) == 1 else self._call(aten.cat.default, images, 1)
        return self._convolve(image, self._weight([span for _, span in plain]), bias)

    def _convolve(self, image: Node, weight: Node, bias: Any) -> Node:
        return self._call(aten.convolution.default, image, weight, bias, *self.node.args[3:])

    def _weight(self, spans: list[tuple[int, int]]) -> Node:
        """Return the columns of the weight for some channels, as a tensor of its own."""
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

    def _restride(self, result: Node) -> Node:
        """Return the result with the strides that readers of the convolution rely on."""
        promised = self.node.meta["val"]
        if lies_alike(result.meta["val"], promised):
            return result
        for op, args, kwargs in list_restriding_calls(promised):
            result = self._call(op, result, *args, **kwargs)
        return result

    def _call(self, op: Any, *args: Any, **kwargs: Any) -> Node:
        node = self.graph.call_function(op, args, kwargs)
        node.meta["val"] = compute_value(node)
        self.added.append(node)
        return node
