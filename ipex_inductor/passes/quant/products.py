"""Compute convolutions and linear layers between quantized values on their integers.

The pass runs behind the fusion rules: a product has its addend and its activation by then. It
becomes one call on integers if it reads dequantized values and a dequantized weight. A quantize
node behind it is part of the call.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ipex_inductor.ops.gemm.linear import LinearArgs
from ipex_inductor.ops.quant.int8_borders import edges_of
from ipex_inductor.ops.quant.int8_operands import INTEGERS, SHIFT
from ipex_inductor.passes.engine.packable import find_symbols, is_transpose
from ipex_inductor.passes.engine.source import user_line
from ipex_inductor.passes.engine.whole_ops import compute_value, keep_strides
from ipex_inductor.passes.quant.limits import (
    FLOATS,
    Product,
    Refused,
    check_addend,
    check_product,
)
from ipex_inductor.passes.quant.plain_convs import read_conv, restate_convs
from ipex_inductor.passes.quant.values import (
    CASTS,
    Quantized,
    Reader,
    is_quantize,
    read_result,
    read_weight,
    use_signed_integers,
)
from ipex_inductor.reporting.decisions import GraphReport

Node = torch.fx.Node
aten, ipex = torch.ops.aten, torch.ops.ipex

NAME = "int8"
# Moves of elements between a product and its quantization, which integers take instead.
RESHAPES = {aten.view.default: aten.reshape.default}
MOVES = {*RESHAPES, aten.reshape.default, aten.permute.default, aten.unsqueeze.default}
MOVES |= {aten.squeeze.dim, aten.slice.Tensor}
PASSED = {*CASTS, aten.clone.default}


def quantize_products(
    graph: torch.fx.Graph, report: GraphReport, why_not: Callable[[torch.device], str | None]
) -> int:
    """Compute products between quantized values on integers; return how many.

    Args:
        graph: the graph, changed in place.
        report: gets the decisions.
        why_not: returns why the kernels of a device are not available, or None.
    """
    use_signed_integers(graph)
    restate_convs(graph, report, why_not)
    reader, count = Reader(graph), 0
    for node in list(graph.nodes):
        if node.target is aten.bmm.default:
            count += _quantize_bmm(graph, reader, node, report, why_not)
            continue
        product = READERS[node.target](node) if node.target in READERS else None
        if product is not None and product.window is not None:
            product = _with_padding(product)
        x = reader.read(product.x) if product else None
        weight = read_weight(product.weight) if product else None
        if product is None or x is None or weight is None:
            continue
        try:
            if reason := why_not(_value(node).device):
                raise Refused(reason)
            other = reader.read(product.other) if product.binary == "add" else None
            other = None if other is None or other.by_row else other
            replaced = _insert_call(graph, node, product, x, weight, other)
        except Refused as refusal:
            report.add("missed", f"int8 {product.name}", str(refusal), user_line(node))
            continue
        count += 1
        ends = "" if replaced is node else "+quantize"
        report.add("fired", f"int8 {product.name}{ends}", where=user_line(node))
    graph.eliminate_dead_code()
    return count


def _with_padding(product: Product) -> Product:
    """Return a convolution that pads by itself, where zeros are padded before it.

    The kernel pads with the zero point, which stands for zero.
    """
    pad: Any = product.x
    if not isinstance(pad, Node) or pad.target is not aten.constant_pad_nd.default:
        return product
    stride, padding, dilation, groups = product.window or ()
    arguments: Any = pad.args
    source, sizes, *value = arguments
    dims = len(stride)
    if find_symbols(sizes=sizes, padding=padding) or (value and value[0] != 0):
        return product
    if len(sizes) > 2 * dims or min(sizes) < 0 or len(padding) != dims:
        return product
    ends = [*sizes, *[0] * (2 * dims - len(sizes))]
    pairs = [*zip(ends[::2], ends[1::2], strict=True)][::-1]
    both = [*zip(*pairs, strict=True)]
    wider = [own + more for side in both for own, more in zip(padding, side, strict=True)]
    return replace(product, x=source, window=(stride, wider, dilation, groups))


def _insert_call(
    graph: torch.fx.Graph,
    node: Node,
    product: Product,
    x: Quantized,
    weight: Quantized,
    other: Quantized | None,
) -> Node:
    """Replace a product, and the quantize node behind it, by a call on integers.

    Args:
        graph: the graph, changed in place.
        node: the node of the product.
        product: its arguments.
        x: the integers of the activation.
        weight: the integers of the weight.
        other: the integers of the addend; None for an addend in floating point, or none.

    Returns:
        The last node that the call replaced: the quantize node, or the product.
    """
    check_product(node, product, x, weight)
    behind = _follow(node)
    last = behind.last
    result = read_result(last) if behind.is_quantized else None
    dtype = _value(last).dtype
    addend = other.integers if other else product.other
    check_addend(node, addend)
    with graph.inserting_before(last):
        builder = _Builder(graph, weight.integers)
        tensors = builder.arrange_weight(product, x, weight)
        scales = builder.join_scales(x, other, result)
        words = (product.binary, product.unary, list(product.scalars), dtype)
        operands = (x.integers, *tensors, scales, addend)
        if product.window is None:
            rows = builder.convert(x.scale, torch.float32) if x.by_row else None
            call = builder.call(ipex.int8_linear.default, *operands, rows, *words)
        else:
            window = _window_of(product.window, weight)
            call = builder.call(ipex.int8_conv.default, *operands, *window, *words)
        call.meta = {**node.meta, "val": call.meta["val"]}
        for target, rest in behind.moves:
            call = builder.call(RESHAPES.get(target, target), call, *rest)
    _replace(graph, last, call)
    return last


def _quantize_bmm(
    graph: torch.fx.Graph,
    reader: Reader,
    node: Node,
    report: GraphReport,
    why_not: Callable[[torch.device], str | None],
) -> bool:
    """Compute a product of two quantized activations on integers; return whether that is done.

    Args:
        graph: the graph, changed in place.
        reader: finds integers behind nodes.
        node: the product.
        report: gets the decisions.
        why_not: returns why the kernels of a device are not available, or None.
    """
    a, b = map(reader.read, node.args)
    if a is None or b is None:
        return False
    behind = _follow(node, scales=True)
    name = "int8 bmm" if behind.factor is None else "int8 bmm+div"
    if reason := _why_no_bmm(behind, a, b) or why_not(_value(node).device):
        report.add("missed", name, reason, user_line(node))
        return False
    last = behind.last
    result = read_result(last) if behind.is_quantized else None
    with graph.inserting_before(last):
        builder = _Builder(graph, a.integers)
        own = builder.numbers(result) if result else (None, None)
        bounds = (result.least, result.most) if result else (0, 0)
        scales = (*builder.numbers(a), *builder.numbers(b), *own, *bounds)
        joined = builder.call(ipex.int8_bmm_scales.default, *scales)
        factor = 1.0 if behind.factor is None else behind.factor
        operands = (a.integers, b.integers, joined, factor, _value(last).dtype)
        call = builder.call(ipex.int8_bmm.default, *operands)
        call.meta = {**node.meta, "val": call.meta["val"]}
        for target, rest in behind.moves:
            call = builder.call(RESHAPES.get(target, target), call, *rest)
    _replace(graph, last, call)
    ends = "+quantize" if behind.is_quantized else ""
    report.add("fired", name + ends, where=user_line(node))
    return True


def _why_no_bmm(behind: "_Behind", a: Quantized, b: Quantized) -> str | None:
    values = _value(a.integers), _value(b.integers)
    if values[0].device.type != "cpu":
        return f"no int8 kernel for {values[0].device.type} yet: it is computed as a float"
    if a.by_row or b.by_row or any(v.dtype not in INTEGERS for v in values):
        return "kernels take 8-bit activations with one scale"
    dtype = _value(behind.last).dtype
    return None if dtype in (*FLOATS["cpu"], *INTEGERS) else f"kernels have no results in {dtype}"


def _replace(graph: torch.fx.Graph, last: Node, call: Node) -> None:
    """Replace `last` by a call of the same shape, and keep its strides."""
    call.meta["val"] = _value(last)
    last.replace_all_uses_with(call)
    graph.erase_node(last)
    keep_strides(graph, call)


class _Builder:
    """Adds nodes at the insertion point of a graph, for a product on one weight."""

    def __init__(self, graph: torch.fx.Graph, weight: Node) -> None:
        self.graph, self.weight = graph, weight

    def call(self, target: Any, *args: Any) -> Node:
        """Return a new call with its fake value."""
        node: Node = self.graph.call_function(target, args)
        node.meta["val"] = compute_value(node)
        return node

    def arrange_weight(
        self, product: Product, x: Quantized, weight: Quantized
    ) -> tuple[Node, Node]:
        """Return the arranged weight, and the factors and offsets of its output channels."""
        groups = product.window[-1] if product.window else 1
        arranged = self.call(ipex.int8_weight.default, weight.integers, groups)
        if x.by_row:
            rows = weight.integers, self.number(weight.scale), product.bias
            return arranged, self.call(ipex.int8_row_factors.default, *rows)
        zeros = weight.zero_point
        if zeros is not None:
            zeros = self.number(zeros, torch.int64)
        own = weight.integers, self.number(weight.scale), zeros, product.bias
        parts = (*self.numbers(x), *own)
        value, edges = _value(x.integers), []
        shift = SHIFT if value.dtype == torch.int8 and value.device.type == "cpu" else 0
        if product.window and value.device.type != "cpu":
            stride, padding, dilation, _ = product.window
            window = _value(weight.integers).shape[2:]
            edges = [*edges_of(value.shape[2:], window, stride, padding[:2], dilation)]
        factors = self.call(ipex.int8_factors.default, *parts, shift, groups, edges)
        return arranged, factors

    def join_scales(self, x: Quantized, other: Quantized | None, result: Quantized | None) -> Node:
        """Return the tensor of the scales of an activation, an addend and a result."""
        others = self.numbers(other) if other else (None, None)
        own = self.numbers(result) if result else (None, None)
        bounds = (result.least, result.most) if result else (0, 0)
        zero_point = self.number(None if x.by_row else x.zero_point, torch.int64)
        return self.call(ipex.int8_scales.default, zero_point, *others, *own, *bounds)

    def convert(self, value: Any, dtype: torch.dtype) -> Node:
        """Return a node of `dtype`, cast if it has another."""
        if _value(value).dtype == dtype:
            node: Node = value
            return node
        return self.call(torch.ops.prims.convert_element_type.default, value, dtype)

    def numbers(self, value: Quantized) -> tuple[Node, Node]:
        """Return the scale and the zero point of a tensor as nodes."""
        return self.number(value.scale), self.number(value.zero_point, torch.int64)

    def number(self, value: Any, dtype: torch.dtype = torch.float32) -> Node:
        """Return a node of one element: a constant for a number."""
        if isinstance(value, Node):
            return value
        number: Any = 0 if value is None else value
        options: dict[str, Any] = {
            "dtype": dtype,
            "device": _value(self.weight).device,
            "pin_memory": False,
        }
        node = self.graph.call_function(aten.full.default, ([], number), options)
        with _value(self.weight).fake_mode:
            node.meta["val"] = torch.full([], number, **options)
        return node


def _window_of(window: tuple[Any, ...], weight: Quantized) -> tuple[Any, ...]:
    stride, padding, dilation, groups = window
    sizes = list(_value(weight.integers).shape[2:])
    return sizes, list(stride), list(padding), list(dilation), groups


@dataclass(frozen=True)
class _Behind:
    """Nodes behind a product that are part of its call.

    Args:
        last: the last of them, or the product.
        moves: moves of elements in order: op and arguments behind the tensor.
        is_quantized: whether `last` is a quantize node.
        factor: multiplies the product; None if nothing does.
    """

    last: Node
    moves: tuple[tuple[Any, tuple[Any, ...]], ...] = ()
    is_quantized: bool = False
    factor: float | None = None


def _follow(product: Node, scales: bool = False) -> _Behind:
    """Return the quantize node that alone reads a product, with moves of elements between them.

    Casts between float dtypes are passed: the kernel rounds once. Copies are passed too: the last
    node keeps its strides.

    Args:
        product: the product.
        scales: whether a multiplication or division by a number is part of the call.
    """
    moves: list[tuple[Any, tuple[Any, ...]]] = []
    node, behind, factor = product, _Behind(product), None
    while len(node.users) == 1:
        (user,) = node.users
        if user.op != "call_function" or user.args[:1] != (node,):
            break
        if is_quantize(user):
            takes = _value(user).dtype in INTEGERS
            return _Behind(user, tuple(moves), True, factor) if takes else behind
        if user.target in MOVES:
            moves.append((user.target, user.args[1:]))
        elif scales and factor is None and _scale_of(user) is not None:
            factor = _scale_of(user)
            behind = _Behind(user, tuple(moves), False, factor)
        elif user.target not in PASSED or not _value(user).dtype.is_floating_point:
            break
        node = user
    return behind


def _scale_of(node: Node) -> float | None:
    """Return the number by which a node multiplies its first argument, or None."""
    if node.target not in (aten.div.Tensor, aten.mul.Tensor) or node.kwargs:
        return None
    number: Any = node.args[1]
    if not isinstance(number, (int, float)) or number == 0:
        return None
    return 1 / number if node.target is aten.div.Tensor else float(number)


def _value(node: Any) -> Any:
    return node.meta["val"]


def _of_conv(node: Node) -> Product | None:
    args = read_conv(node)
    if args is None or args.transposed:
        return None
    window = args.stride, args.padding, args.dilation, args.groups
    words = (args.binary, args.unary, tuple(args.scalars))
    return Product(args.x, args.weight, args.bias, args.other, window, *words)


def _of_linear(node: Node) -> Product | None:
    args = LinearArgs.of(node)
    words = (args.binary, args.unary, tuple(args.scalars))
    return Product(args.x, args.weight, args.bias, args.other, None, *words)


def _of_addmm(node: Node) -> Product | None:
    bias, x, weight = node.args
    assert isinstance(weight, Node)
    if node.kwargs or not is_transpose(weight) or _value(bias).dim() != 1:
        return None
    return Product(x, weight.args[0], bias)


def _of_mm(node: Node) -> Product | None:
    x, weight = node.args
    assert isinstance(weight, Node)
    return Product(x, weight.args[0]) if is_transpose(weight) else None


READERS: dict[Any, Callable[[Node], Product | None]] = {
    aten.convolution.default: _of_conv,
    aten.addmm.default: _of_addmm,
    aten.mm.default: _of_mm,
    ipex.conv.default: _of_conv,
    ipex.linear.default: _of_linear,
}
