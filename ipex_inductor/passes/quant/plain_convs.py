"""Restate convolutions between quantized values as those that kernels on integers serve.

A transposed convolution with stride s computes s neighboring pixels from the same pixels of its
input: it is a plain convolution with s times as many channels for each dimension, whose results
are interleaved. A convolution over one dimension is one over two, the first of size 1.
"""

import math
import operator
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ipex_inductor.ops.conv.conv import ConvArgs
from ipex_inductor.passes.engine.packable import find_symbols
from ipex_inductor.passes.engine.source import user_line
from ipex_inductor.passes.engine.whole_ops import compute_value, keep_strides
from ipex_inductor.passes.quant.limits import Product, Refused, check_addend, check_product
from ipex_inductor.passes.quant.values import Quantized, Reader, make_zeros, read_weight
from ipex_inductor.reporting.decisions import GraphReport

Node = torch.fx.Node
aten, ipex = torch.ops.aten, torch.ops.ipex
quantized = torch.ops.quantized_decomposed

TRANSPOSED = "int8 conv_transpose"


def restate_convs(
    graph: torch.fx.Graph, report: GraphReport, why_not: Callable[[torch.device], str | None]
) -> None:
    """Restate transposed and one-dimensional convolutions of dequantized values.

    Args:
        graph: the graph, changed in place.
        report: gets the transposed convolutions that stay in floating point.
        why_not: returns why the kernels of a device are not available, or None.
    """
    reader = Reader(graph)
    for node in list(graph.nodes):
        args = read_conv(node)
        if args is None or not (args.transposed or len(args.stride) == 1):
            continue
        weight = read_weight(args.weight)
        if weight is None or reader.read(args.x) is None:
            continue
        reason = why_not(node.meta["val"].device) or _why_not(node, args, weight)
        if not reason:
            with graph.inserting_before(node):
                reason = _Restated(graph, node, args, weight).replace(reader)
        if reason and args.transposed:
            report.add("missed", TRANSPOSED, reason, user_line(node))
    graph.eliminate_dead_code()


def read_conv(node: Node) -> ConvArgs | None:
    """Return a convolution's arguments as those of `ipex::conv`, None for another node.

    Each dimension has its own stride, padding and dilation: one number may stand for all.
    """
    if node.target is ipex.conv.default:
        args = ConvArgs.of(node)
    elif node.target is aten.convolution.default:
        x, weight, bias, *window = node.args
        arguments: Any = (x, weight, bias, None, *window, "none", "none", [])
        args = ConvArgs(*arguments)
    else:
        return None
    if args.packed:
        return None
    dims = args.weight.meta["val"].dim() - 2
    return args._replace(
        stride=_each(args.stride, dims),
        padding=_each(args.padding, dims),
        dilation=_each(args.dilation, dims),
        output_padding=_each(args.output_padding, dims),
    )


def _why_not(node: Node, args: ConvArgs, weight: Quantized) -> str | None:
    """Return why a convolution of dequantized values cannot be restated, None if it can."""
    window = {"stride": args.stride, "padding": args.padding, "dilation": args.dilation}
    value = node.meta["val"]
    if value.device.type != "cpu":
        return f"no int8 kernel for {value.device.type} yet: it is computed as a float"
    if reason := find_symbols(**window, weight=list(weight.integers.meta["val"].shape)):
        return reason
    if weight.axis not in (None, int(args.transposed)):
        return "the weight has no scale of each output channel"
    if not args.transposed:
        return None
    if weight.zero_point is not None:
        return "the weight of a transposed convolution has zero points"
    if {*args.dilation} != {1}:
        return "kernels of transposed convolutions have no dilation"
    if args.binary != "none":
        return "the addend is part of the transposed convolution"
    taps = weight.integers.meta["val"].shape[2:]
    if any(
        pad // step > -(-size // step) - 1
        for pad, step, size in zip(args.padding, args.stride, taps, strict=True)
    ):
        return "the padding leaves out whole pixels of the input"
    return None


def _each(values: Sequence[int], dims: int) -> list[int]:
    """Return one number for each dimension; a single number stands for all."""
    return [*values] * (dims if len(values) == 1 else 1)


class _Restated:
    """Adds the nodes of one restated convolution at the insertion point of a graph.

    Args:
        graph: the graph, changed in place.
        node: the convolution.
        args: its arguments.
        weight: the integers of its weight.
    """

    def __init__(
        self, graph: torch.fx.Graph, node: Node, args: ConvArgs, weight: Quantized
    ) -> None:
        self.graph, self.node, self.args, self.weight = graph, node, args, weight
        self.moves: list[tuple[Any, tuple[Any, ...]]] = []  # of the result, in order
        self.ends: list[tuple[int, int]] = []  # pixels more at both ends of each dimension

    def replace(self, reader: Reader) -> str | None:
        """Replace the convolution by a plain one and moves of its result; return why not, or None.

        Nodes of a plain convolution that no kernel serves are dead code.

        Args:
            reader: finds integers behind nodes of the graph.
        """
        if self.args.transposed:
            self._join_phases()
        if len(self.args.stride) == 1:
            self._add_dimension()
        x = reader.read(self.args.x)
        self._pad()
        value = self._dequantize()
        result = self.call(ipex.conv.default, *self.args._replace(weight=value))
        try:
            self._check(result, x, reader)
        except Refused as refusal:
            return str(refusal)
        result.meta = {**self.node.meta, "val": result.meta["val"]}
        for target, rest in self.moves:
            result = self.call(target, result, *rest)
        promised = self.node.meta["val"]
        self.node.replace_all_uses_with(result)
        result.meta["val"] = promised
        keep_strides(self.graph, result)
        self.graph.erase_node(self.node)
        return None

    def _check(self, result: Node, x: Quantized | None, reader: Reader) -> None:
        """Raise `Refused` if no kernel serves the plain convolution."""
        if x is None:
            raise Refused("scales of rows are for linear layers")
        args = self.args
        window = args.stride, args.padding, args.dilation, args.groups
        words = args.binary, args.unary, tuple(args.scalars)
        product = Product(args.x, args.weight, args.bias, args.other, window, *words)
        check_product(result, product, x, self.weight)
        other = reader.read(args.other) if args.binary == "add" else None
        check_addend(result, args.other if other is None or other.by_row else other.integers)

    def call(self, target: Any, *args: Any) -> Node:
        """Return a new call with its fake value."""
        node: Node = self.graph.call_function(target, args)
        node.meta["val"] = compute_value(node)
        return node

    def _dequantize(self) -> Node:
        """Return the dequantized form of the new weight."""
        weight, scale, zeros = self.weight, self.weight.scale, self.weight.zero_point
        bounds = weight.least, weight.most, weight.integers.meta["val"].dtype
        words: tuple[Any, ...]
        if zeros is None:
            is_node = isinstance(scale, Node)
            zeros = make_zeros(self.graph, scale, torch.int64) if is_node else 0  # type: ignore[arg-type]
        if weight.axis is not None:
            target, words = quantized.dequantize_per_channel.default, (scale, zeros, 0, *bounds)
        else:
            overload = "tensor" if isinstance(scale, Node) else "default"
            target = getattr(quantized.dequantize_per_tensor, overload)
            words = (scale, zeros, *bounds)
        value, dtype = self.call(target, weight.integers, *words), self.args.x.meta["val"].dtype
        cast = torch.ops.prims.convert_element_type.default
        return value if dtype == value.meta["val"].dtype else self.call(cast, value, dtype)

    def _join_phases(self) -> None:
        """Make a transposed convolution a plain one of all pixels that one step computes."""
        args, taps = self.args, self.weight.integers.meta["val"].shape[2:]
        groups, outs = args.groups, self.weight.integers.meta["val"].shape[1]
        axes = [*zip(taps, args.stride, args.padding, args.output_padding, strict=True)]
        reach = [-(-size // step) for size, step, _, _ in axes]
        begins = [n - 1 - axis[2] // axis[1] for n, axis in zip(reach, axes, strict=True)]
        # The last pixel is in step (size - 1) + (taps - 1 - padding + more) // stride.
        ends = [(size - 1 - pad + extra) // step for size, step, pad, extra in axes]
        self.ends = [*zip(begins, ends, strict=True)]
        self.weight = self._phase_weight(groups, reach)
        bias = None if args.bias is None else self._phase_bias(groups, outs)
        self._interleave(groups, outs)
        for dim, (size, step, pad, extra) in enumerate(axes):
            rest = step * (ends[dim] + 1) + pad - size - extra
            if pad % step or rest:
                words = (dim + 2, pad % step, -rest if rest else sys.maxsize)
                self.moves.append((aten.slice.Tensor, words))
        ones, none = [1] * len(axes), [0] * len(axes)
        args = args._replace(bias=bias, stride=ones, padding=none, output_padding=none)
        self.args = args._replace(transposed=False)

    def _phase_bias(self, groups: int, outs: int) -> Node:
        """Return the bias of all phases: as many as the channels of the plain convolution."""
        phases = math.prod(self.args.stride)
        bias = self.call(aten.reshape.default, self.args.bias, [groups, 1, outs])
        bias = self.call(aten.expand.default, bias, [groups, phases, outs])
        return self.call(aten.reshape.default, bias, [groups * phases * outs])

    def _phase_weight(self, groups: int, reach: list[int]) -> Quantized:
        """Return the weight [groups * phases * outs, channels of a group, *reach], and scales."""
        integers, stride = self.weight.integers, [*self.args.stride]
        channels, outs, *taps = integers.meta["val"].shape
        dims = len(stride)
        wider = [
            size
            for n, step, own in reversed([*zip(reach, stride, taps, strict=True)])
            for size in (0, n * step - own)
        ]
        node = self.call(aten.constant_pad_nd.default, integers, wider) if any(wider) else integers
        split = [n for pair in zip(reach, stride, strict=True) for n in pair]
        some = channels // groups
        node = self.call(aten.reshape.default, node, [groups, some, outs, *split])
        steps = [3 + 2 * dim for dim in range(dims)]
        node = self.call(aten.flip.default, node, steps)
        order = [0, *(step + 1 for step in steps), 2, 1, *steps]
        node = self.call(aten.permute.default, node, order)
        phases = math.prod(stride)
        shape = [groups * phases * outs, some, *reach]
        node = self.call(aten.reshape.default, node, shape)
        scale = self.weight.scale
        if self.weight.axis is not None:
            scale = self.call(aten.expand.default, scale, [groups * phases, outs])
            scale = self.call(aten.reshape.default, scale, [groups * phases * outs])
        axis = None if self.weight.axis is None else 0
        least, most = self.weight.least, self.weight.most
        return Quantized(node, scale, None, least, most, axis)

    def _pad(self) -> None:
        """Pad or cut the activation; the pass of products finds the pad, and the kernel pads."""
        x = self.args.x
        sizes: list[int] = []
        for dim, (begin, end) in enumerate(self.ends):
            sizes = [begin, max(0, end), *sizes]
            if end < 0:
                x = self.call(aten.slice.Tensor, x, dim + 2, 0, end)
        x = self.call(aten.constant_pad_nd.default, x, sizes, 0.0) if any(sizes) else x
        self.args = self.args._replace(x=x)

    def _interleave(self, groups: int, outs: int) -> None:
        """Move the channels of the phases to their pixels."""
        stride = [*self.args.stride]
        if math.prod(stride) == 1:
            return
        dims, reach = len(stride), self.weight.integers.meta["val"].shape[2:]
        more = [sum(ends) - n + 1 for ends, n in zip(self.ends, reach, strict=True)]
        steps = [self._size(dim, more[dim], 1) for dim in range(dims)]
        self.moves.append((aten.reshape.default, ([-1, groups, *stride, outs, *steps],)))
        pairs = [d for dim in range(dims) for d in (3 + dims + dim, 2 + dim)]
        self.moves.append((aten.permute.default, ([0, 1, 2 + dims, *pairs],)))
        sizes = [self._size(dim, more[dim], stride[dim]) for dim in range(dims)]
        self.moves.append((aten.reshape.default, ([-1, groups * outs, *sizes],)))

    def _size(self, dim: int, more: int, factor: int) -> Any:
        """Return `(size + more) * factor` of a dimension of the image: a node if it varies."""
        size = self.args.x.meta["val"].shape[dim + 2]
        if isinstance(size, int):
            return (size + more) * factor
        node = self.graph.call_function(aten.sym_size.int, (self.args.x, dim + 2))
        total = self.graph.call_function(operator.add, (node, more))
        result = self.graph.call_function(operator.mul, (total, factor))
        node.meta["val"], total.meta["val"] = size, size + more
        result.meta["val"] = (size + more) * factor
        return result

    def _add_dimension(self) -> None:
        """Make a convolution over one dimension one over two."""
        args, weight = self.args, self.weight

        def widen(node: Any) -> Any:
            return None if node is None else self.call(aten.unsqueeze.default, node, 2)

        self.weight = replace(weight, integers=widen(weight.integers))
        self.ends = [(0, 0), *self.ends]
        self.args = args._replace(
            x=widen(args.x),
            other=widen(args.other),
            stride=[1, *args.stride],
            padding=[0, *args.padding],
            dilation=[1, *args.dilation],
            output_padding=[0, 0],
        )
        self.moves.insert(0, (aten.squeeze.dim, (2,)))
