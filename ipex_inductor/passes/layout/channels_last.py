"""Channels-last images in an inference graph, where Inductor would lower them so itself.

Inductor converts on the way down, on a GPU weights at every call. Done here, conversions of weights
are weight-only work, and what libraries and kernels of ours have for such images may be chosen.
"""

import operator
from typing import Any

import torch
from torch import Tensor
from torch._inductor import inductor_prims
from torch._inductor.virtualized import V
from torch.utils._pytree import tree_leaves

from ipex_inductor import compat, ops  # noqa: F401  registers the ipex:: ops
from ipex_inductor.reporting.decisions import GraphReport

Node = torch.fx.Node
aten = torch.ops.aten

NAME = "channels-last"
LAST = torch.channels_last
DEVICES = ("cpu", "cuda")

# Where convolutions have their images, and their weight.
WEIGHT = 1
IMAGES: dict[Any, tuple[int, ...]] = {
    aten.convolution.default: (0,),
    torch.ops.ipex.conv.default: (0, 3),
}

# Ops that are as well done in the layout they are given, beside all that is pointwise.
FOLLOWING = frozenset(
    {
        operator.getitem,
        aten._adaptive_avg_pool2d.default,
        aten._native_batch_norm_legit_no_training.default,
        aten._unsafe_index.Tensor,  # what is left of upsampling
        aten.avg_pool2d.default,
        aten.cat.default,
        aten.constant_pad_nd.default,
        aten.max_pool2d_with_indices.default,
        aten.mean.dim,
        inductor_prims._low_memory_max_pool_with_offsets,
    }
)


def convert(graph: torch.fx.Graph, report: GraphReport) -> None:
    """Have the convolutions over planes read and give channels-last; all others what they had.

    Results of the graph keep their strides.
    """
    converted = [node for node in graph.nodes if _is_converted(node)]
    if not converted:
        return
    _Conversion(graph, {*converted}).run()
    report.add("choice", NAME, f"{len(converted)} convolutions, as Inductor would have it")


def hold_strides(graph: torch.fx.Graph) -> None:
    """Have higher-order ops read what their bodies are compiled for.

    Inductor lowers a convolution to channels-last whatever the graph says of its strides, and makes
    no copies for those ops; nor does it look at the format that a copy is asked for.
    """
    if not any(node.target in IMAGES for node in graph.nodes):
        return
    for node in list(graph.nodes):
        if not isinstance(node.target, torch._ops.HigherOrderOperator):
            continue
        for each in node.all_input_nodes:
            if each.op == "call_function" and isinstance(_val(each), Tensor):
                with graph.inserting_before(node):
                    order = [compat.hints(stride) for stride in _val(each).stride()]
                    held = graph.call_function(inductor_prims.force_stride_order, (each, order))
                held.meta["val"] = _val(each)
                node.replace_input_with(each, held)


def _is_converted(node: Node) -> bool:
    if node.target not in IMAGES or not is_on_cpu_or_gpu(node) or _val(node).dim() != 4:
        return False
    return not all(map(_is_last, _images(node)))


def is_on_cpu_or_gpu(node: Node) -> bool:
    """Whether its result is on a CPU, or on a GPU of NVIDIA or AMD."""
    return _val(node).device.type in DEVICES


def _images(node: Node) -> list[Node]:
    """Its images, and on a GPU the weight, which is packed on a CPU, whatever its layout."""
    places = IMAGES[node.target] + (WEIGHT,) * _on_gpu(node)
    given = (node.args[place] for place in places if place < len(node.args))
    return [each for each in given if isinstance(each, Node)]


def _on_gpu(node: Node) -> bool:
    found: bool = _val(node).is_cuda
    return found


def _val(node: Node) -> Any:
    return node.meta["val"]


def _is_last(node: Node) -> bool:
    found: bool = _val(node).is_contiguous(memory_format=LAST)
    return found


class _Conversion:
    """One walk through the graph; `was` has the former value of each node with another layout."""

    def __init__(self, graph: torch.fx.Graph, converted: set[Node]) -> None:
        self.graph, self.converted = graph, converted
        self.was: dict[Node, Any] = {}
        self.copies: dict[tuple[Node, str], Node] = {}

    def run(self) -> None:
        """Every node once, in order, so that what it reads is known."""
        for node in list(self.graph.nodes):
            if node in self.converted:
                for image in _images(node):
                    if not _is_last(image):
                        node.replace_input_with(image, self._last(image, node))
                self._know_again(node)
            elif any(each in self.was for each in node.all_input_nodes):
                self._read_by(node)

    def _read_by(self, node: Node) -> None:
        if not _follows(node):
            for each in node.all_input_nodes:
                if each in self.was and not (_is_view(node) and _lies_alike(each, self.was[each])):
                    node.replace_input_with(each, self._former(each, node))
        if any(each in self.was for each in node.all_input_nodes):
            self._know_again(node)

    def _know_again(self, node: Node) -> None:
        """Its value, of the inputs that it has now."""
        former = _val(node)
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), _val)
        with V.fake_mode:
            node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]
        if _strides(_val(node)) != _strides(former):
            self.was[node] = former

    def _last(self, image: Node, user: Node) -> Node:
        return self._copy(image, user, "last", lambda x: self._clone(x, LAST))

    def _former(self, image: Node, user: Node) -> Node:
        """A copy in the layout that `image` had."""
        order = self.was[image].dim_order()
        back = sorted(range(len(order)), key=order.__getitem__)

        def copied(x: Node) -> Node:
            if [*order] == back == sorted(order):
                return self._clone(x, torch.contiguous_format)
            inner = self._call(aten.permute.default, x, [*order])
            return self._call(
                aten.permute.default, self._clone(inner, torch.contiguous_format), back
            )

        return self._copy(image, user, "former", copied)

    def _copy(self, image: Node, user: Node, layout: str, make: Any) -> Node:
        """One for all users; the first that asks stands before the others."""
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
    """Whether it does the same in another layout: no view by strides, no order of random draws."""
    if node.target in FOLLOWING:
        return True
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags


def _strides(value: Any) -> list[tuple[int, ...]]:
    return [t.stride() for t in tree_leaves(value) if isinstance(t, Tensor)]


def _is_view(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.is_view


def _lies_alike(node: Node, former: Any) -> bool:
    """Whether elements lie where they did: the stride of a single one says nothing."""
    now = _val(node)
    if not isinstance(now, Tensor):
        return False
    pairs = zip(now.shape, now.stride(), former.stride(), strict=True)
    return all(size == 1 or new == old for size, new, old in pairs)
