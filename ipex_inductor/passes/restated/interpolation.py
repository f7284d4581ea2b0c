"""Find images that are interpolated from smaller ones.

Interpolation is known by what it computes: sums of pixels that are picked by indices, with factors
that are equal for all channels. So each mode is found in the form that decompositions leave of it.
"""

import math
from typing import Any

import torch
from torch import Tensor

Node = torch.fx.Node
aten, prims = torch.ops.aten, torch.ops.prims

# Ops that are linear in each operand of an image, and act on all channels alike.
PICKS = (aten._unsafe_index.Tensor, aten.index.Tensor)
SUMS = (aten.add.Tensor, aten.sub.Tensor)
CAST = prims.convert_element_type.default
COPY = aten.clone.default
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Upsampling:
    """Nodes that compute an image from one that is not larger, in order.

    Args:
        source: The image [N, C, h, w] that pixels are picked from.
        nodes: The nodes, of which the last is the result [N, C, H, W].
    """

    def __init__(self, source: Node, nodes: list[Node]) -> None:
        self.source, self.nodes = source, nodes

    @property
    def growth(self) -> float:
        """The pixels of the result for each of the source."""
        large, small = (
            math.prod(node.meta["val"].shape[2:]) for node in (self.nodes[-1], self.source)
        )
        return float(large / small)

    @property
    def picks(self) -> int:
        """The pixels of the source that each pixel of the result is computed from."""
        return sum(node.target in PICKS for node in self.nodes)


def find_upsampling(image: Node) -> Upsampling | None:
    """Return how an image [N, C, H, W] is computed from one that is not larger, or None."""
    tracer = _Tracer()
    source = tracer.trace(image)
    if source is None or not tracer.nodes:
        return None
    values = [node.meta["val"] for node in (source, image)]
    sizes = [size for value in values for size in value.shape[1:]]
    are_images = all(value.dim() == 4 for value in values)
    if not are_images or not all(isinstance(size, int) and size for size in sizes):
        return None
    upsampling = Upsampling(source, [*tracer.nodes])
    return upsampling if upsampling.growth >= 1 else None


class _Tracer:
    """One search from an image back to its source.

    `nodes` holds the nodes between, operands first; `sources` what was found for each node, as a
    node may be an operand of many.
    """

    def __init__(self) -> None:
        self.nodes: dict[Node, None] = {}
        self.sources: dict[Node, Node | None] = {}

    def trace(self, node: Any) -> Node | None:
        """Return the image whose pixels a node mixes, or None."""
        if not isinstance(node, Node) or node.op != "call_function":
            return None
        if node not in self.sources:
            self.sources[node] = source = self._trace_call(node)
            if source is not None:
                self.nodes[node] = None
        return self.sources[node]

    def _trace_call(self, node: Node) -> Node | None:
        if node.target in PICKS:
            return self._trace_picked(node)
        if node.target is COPY or (node.target is CAST and _is_float_cast(node)):
            return self.trace(node.args[0])
        if node.target in SUMS and not node.kwargs:
            first, second = node.args
            source = self.trace(first)
            return source if source is not None and self.trace(second) is source else None
        return self._trace_weighted(node) if node.target is aten.mul.Tensor else None

    def _trace_picked(self, node: Node) -> Node | None:
        """Return the image of which a node picks rows and columns, before it is cast."""
        image: Any
        indices: Any
        image, indices = node.args
        if len(indices) != 4 or indices[0] is not None or indices[1] is not None:
            return None
        source: Node = image
        if image.target is CAST and _is_float_cast(image):
            self.nodes[image] = None
            source = image.args[0]
        return source

    def _trace_weighted(self, node: Node) -> Node | None:
        """Return the source of a product with a factor that is equal for all channels."""
        for image, factor in (node.args, node.args[::-1]):
            value = factor.meta["val"] if isinstance(factor, Node) else factor
            is_equal = not isinstance(value, Tensor) or value.dim() <= 2
            source = self.trace(image) if is_equal else None
            if source is not None:
                return source
        return None


def _is_float_cast(node: Node) -> bool:
    operand: Any = node.args[0]
    return node.meta["val"].dtype in FLOATS and operand.meta["val"].dtype in FLOATS
