"""Convert activations of an inference graph to channels-last.

Images are converted where Inductor would do so itself. It converts while it lowers, on a GPU
weights at every call. Done here, conversions of weights are weight-only work, and libraries' and
our kernels for channels-last may be chosen.

Videos on a GPU are converted in 16 bits: cuDNN's kernels on tensor cores read channels-last alone,
and it copies the input and the result of each layer that is not.
"""

import operator
from typing import Any

import torch
from torch import Tensor
from torch._inductor import inductor_prims
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch.utils._pytree import tree_leaves

from ipex_inductor import compat, ops  # noqa: F401  registers the ipex:: ops
from ipex_inductor.passes.quant.values import is_dequantize, is_quantize
from ipex_inductor.reporting.decisions import GraphReport

Node = torch.fx.Node
aten = torch.ops.aten

NAME = "channels-last"
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}  # by the number of dimensions
DEVICES = ("cpu", "cuda")
HALVES = (torch.bfloat16, torch.float16)
VECTOR = 8  # channels in 16 bytes, which a kernel reads at once

# Argument numbers of the activations and of the weight of a convolution.
WEIGHT = 1
IMAGES: dict[Any, tuple[int, ...]] = {
    aten.convolution.default: (0,),
    torch.ops.ipex.conv.default: (0, 3),
    torch.ops.ipex.int8_conv.default: (0, 4),
}

# Ops that are equally fast in the layout of their input, besides all pointwise ops.
FOLLOWING = frozenset(
    {
        operator.getitem,
        aten._adaptive_avg_pool2d.default,
        aten._adaptive_avg_pool3d.default,
        aten._native_batch_norm_legit_no_training.default,
        aten._unsafe_index.Tensor,  # decomposed upsampling
        aten.avg_pool2d.default,
        aten.avg_pool3d.default,
        aten.cat.default,
        aten.constant_pad_nd.default,
        aten.max_pool2d_with_indices.default,
        aten.max_pool3d_with_indices.default,
        aten.mean.dim,
        inductor_prims._low_memory_max_pool_with_offsets,
        torch.ops.ipex.int8_max_pool.default,
    }
)


def is_preferred(graph: torch.fx.Graph) -> bool:
    """Return whether Inductor would lower convolutions of this graph to channels-last."""
    images = graph.find_nodes(op="call_function", target=aten.convolution.default)
    gm = graph.owning_module
    if gm is None or not any(map(is_on_cpu_or_gpu, images)):
        return False
    return GraphLowering.decide_layout_opt(gm, is_inference=True)


def has_videos(graph: torch.fx.Graph) -> bool:
    """Return whether a graph has a 3D convolution that is to be converted."""
    return any(map(_is_video, graph.nodes))


def convert(graph: torch.fx.Graph, report: GraphReport, with_images: bool = True) -> None:
    """Have convolutions read and return channels-last; all other nodes keep their layouts.

    Results of the graph keep their strides.

    Args:
        graph: The graph, changed in place.
        report: Gets the decisions.
        with_images: Whether 2D convolutions are converted, not only 3D ones.
    """
    converted = [n for n in graph.nodes if (with_images and _is_image(n)) or _is_video(n)]
    if not converted:
        return
    _Conversion(graph, {*converted}).run()
    videos = sum(_val(node).dim() == 5 for node in converted)
    if videos:
        report.add("choice", NAME, f"{videos} 3D convolutions, as cuDNN's fast kernels read them")
    if videos < len(converted):
        images = len(converted) - videos
        report.add("choice", NAME, f"{images} convolutions, as Inductor would have it")


def hold_strides(graph: torch.fx.Graph) -> None:
    """Have higher-order ops read the strides that their bodies are compiled for.

    Inductor lowers a convolution to channels-last whatever strides the graph has, and makes no
    copies for these ops; nor does it respect the memory format of a clone.
    """
    if not any(node.target in IMAGES for node in graph.nodes):
        return
    for node in list(graph.nodes):
        if not isinstance(node.target, torch._ops.HigherOrderOperator):
            continue
        for operand in node.all_input_nodes:
            if operand.op == "call_function" and isinstance(_val(operand), Tensor):
                with graph.inserting_before(node):
                    order = [compat.hints(stride) for stride in _val(operand).stride()]
                    held = graph.call_function(inductor_prims.force_stride_order, (operand, order))
                held.meta["val"] = _val(operand)
                node.replace_input_with(operand, held)


def _is_image(node: Node) -> bool:
    """Return whether a node is a 2D convolution that is not channels-last."""
    if node.target not in IMAGES or not is_on_cpu_or_gpu(node) or _val(node).dim() != 4:
        return False
    return not all(map(_is_last, _images(node)))


def _is_video(node: Node) -> bool:
    """Return whether a node is a dense 3D convolution on an NVIDIA GPU that has a fast kernel."""
    if node.target not in IMAGES or not _on_gpu(node) or _val(node).dim() != 5:
        return False
    weight: Any = node.args[WEIGHT]
    channels, width = _val(_images(node)[0]).shape[1], _val(weight).shape[1]
    return (
        torch.version.hip is None
        and _val(node).dtype in HALVES
        and isinstance(channels, int)
        and channels % VECTOR == 0
        and channels == width  # one group
        and not all(map(_is_last, _images(node)))
    )


def is_on_cpu_or_gpu(node: Node) -> bool:
    """Return whether the result of a node is on a CPU, or on a GPU of NVIDIA or AMD."""
    return _val(node).device.type in DEVICES


def _images(node: Node) -> list[Node]:
    """Return the activations of a convolution, and on a GPU its weight.

    On a CPU the weight is packed, whatever its layout, and a weight of integers on a GPU too.
    """
    is_arranged = node.target is torch.ops.ipex.int8_conv.default
    numbers = IMAGES[node.target] + (WEIGHT,) * (_on_gpu(node) and not is_arranged)
    operands = (node.args[number] for number in numbers if number < len(node.args))
    return [operand for operand in operands if isinstance(operand, Node)]


def _on_gpu(node: Node) -> bool:
    is_cuda: bool = _val(node).is_cuda
    return is_cuda


def _val(node: Node) -> Any:
    return node.meta["val"]


def _is_last(node: Node) -> bool:
    return compat.is_channels_last(_val(node))


class _Conversion:
    """One walk through the graph; `was` has the former value of each node whose layout changed."""

    def __init__(self, graph: torch.fx.Graph, converted: set[Node]) -> None:
        self.graph, self.converted = graph, converted
        self.was: dict[Node, Any] = {}
        self.copies: dict[tuple[Node, str], Node] = {}

    def run(self) -> None:
        """Visit every node once, in order, so that its inputs are already converted."""
        for node in list(self.graph.nodes):
            if node in self.converted:
                for image in _images(node):
                    if not _is_last(image):
                        node.replace_input_with(image, self._last(image, node))
                self._know_again(node)
            elif any(operand in self.was for operand in node.all_input_nodes):
                self._read_by(node)

    def _read_by(self, node: Node) -> None:
        if not _follows(node):
            for operand in node.all_input_nodes:
                if operand in self.was and not (
                    _is_view(node) and _lies_alike(operand, self.was[operand])
                ):
                    node.replace_input_with(operand, self._former(operand, node))
        if any(operand in self.was for operand in node.all_input_nodes):
            self._know_again(node)

    def _know_again(self, node: Node) -> None:
        """Recompute the fake value of a node from its present inputs."""
        former = _val(node)
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), _val)
        with V.fake_mode:
            node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]
        if _strides(_val(node)) != _strides(former):
            self.was[node] = former

    def _last(self, image: Node, user: Node) -> Node:
        return self._copy(image, user, "last", lambda x: self._clone(x, LAST[_val(x).dim()]))

    def _former(self, image: Node, user: Node) -> Node:
        """Return a copy of `image` in its former layout."""
        order = self.was[image].dim_order()
        back = sorted(range(len(order)), key=order.__getitem__)

        def make_copy(x: Node) -> Node:
            if [*order] == back == sorted(order):
                return self._clone(x, torch.contiguous_format)
            inner = self._call(aten.permute.default, x, [*order])
            return self._call(
                aten.permute.default, self._clone(inner, torch.contiguous_format), back
            )

        return self._copy(image, user, "former", make_copy)

    def _copy(self, image: Node, user: Node, layout: str, make: Any) -> Node:
        """Return the copy of `image` in a layout, created before the first user and shared by all.

        Args:
            image: The node to copy.
            user: The node that reads the copy; the first one comes before all others.
            layout: The name of the layout.
            make: Returns a new copy of a node.
        """
        if (image, layout) not in self.copies:
            with self.graph.inserting_before(user):
                self.copies[image, layout] = make(image)
        return self.copies[image, layout]

    def _clone(self, x: Node, format: torch.memory_format) -> Node:
        return self._call(aten.clone.default, x, memory_format=format)

    def _call(self, op: Any, *args: Any, **kwargs: Any) -> Node:
        node = self.graph.call_function(op, args, kwargs)
        with V.fake_mode:
            node.meta["val"] = op(*torch.fx.map_arg(args, _val), **kwargs)
        return node


def _follows(node: Node) -> bool:
    """Return whether a node gives equal results in another layout: no strides, no random draws."""
    if node.target in FOLLOWING or is_quantize(node) or is_dequantize(node):
        return True
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags


def _strides(value: Any) -> list[tuple[int, ...]]:
    return [t.stride() for t in tree_leaves(value) if isinstance(t, Tensor)]


def _is_view(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.is_view


def _lies_alike(node: Node, former: Any) -> bool:
    """Return whether strides are unchanged; the stride of a single element does not count."""
    value = _val(node)
    if not isinstance(value, Tensor):
        return False
    pairs = zip(value.shape, value.stride(), former.stride(), strict=True)
    return all(size == 1 or new == old for size, new, old in pairs)
