"""Read quantized values of a graph: integers, and the scale and zero point that they stand for.

Graphs of `ipex_inductor.quantization` and of torchao have quantize and dequantize nodes of torch's
`quantized_decomposed` ops around the ops that are quantized.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ipex_inductor.ops.quant.int8_operands import SHIFT
from ipex_inductor.passes.engine.rule import equal_shapes, same_size
from ipex_inductor.passes.engine.whole_ops import compute_value, inline

Node = torch.fx.Node
aten, prims = torch.ops.aten, torch.ops.prims

RESHAPES = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
ZEROS = aten.lt.Tensor  # of a tensor and itself, for all numbers
POOL = prims._low_memory_max_pool_with_offsets.default
CASTS = (prims.convert_element_type.default, aten._to_copy.default)
# Ops that move integers without reading them.
MOVES = frozenset(
    {
        aten.view.default,
        aten._unsafe_view.default,
        aten.reshape.default,
        aten.permute.default,
        aten.transpose.int,
        aten.t.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.unsqueeze.default,
        aten.expand.default,
        aten.slice.Tensor,
        aten.clone.default,
    }
)


@dataclass(frozen=True)
class Quantized:
    """Integers and what they stand for: `(integers - zero_point) * scale`.

    Args:
        integers: node of a tensor in uint8 or int8.
        scale: node of one element, or of as many as `axis` has; or a number.
        zero_point: as the scale, or None for zero.
        least: the least integer.
        most: the largest integer.
        axis: the dimension of the scales; None for a scale of the whole tensor, or of each row.
        by_row: whether `scale` is [..., 1], of each row.
    """

    integers: Node
    scale: Node | float
    zero_point: Node | int | None
    least: int
    most: int
    axis: int | None = None
    by_row: bool = False


def is_quantize(node: Any) -> bool:
    """Return whether `node` quantizes a tensor by one scale."""
    return _calls(node, "quantize_per_tensor")


def is_dequantize(node: Any) -> bool:
    """Return whether `node` dequantizes a tensor by one scale."""
    return _calls(node, "dequantize_per_tensor")


class Reader:
    """Finds the integers behind nodes of one graph, through views, casts and max pools.

    A view of dequantized values is the dequantized view of their integers, and so is a max pool.
    Nodes for these integers are added once; unused ones are dead code.
    """

    def __init__(self, graph: torch.fx.Graph) -> None:
        self.graph = graph
        self._read: dict[Node, Quantized | None] = {}

    def read(self, node: Any) -> Quantized | None:
        """Return the integers that a node has dequantized, None for another node.

        A cast to another float dtype is passed: kernels compute in fp32.
        """
        node = _without_casts(node)
        if not isinstance(node, Node) or node.op != "call_function":
            return None
        if node not in self._read:
            self._read[node] = self._read_anew(node)
        return self._read[node]

    def _read_anew(self, node: Node) -> Quantized | None:
        if _calls(node, "dequantize_per_tensor"):
            integers, scale, zero_point, least, most, *_ = _arguments(node)
            return Quantized(integers, scale, zero_point, least, most)
        if _calls(node, "dequantize_per_token"):
            integers, scale, zero_point, least, most, *_ = _arguments(node)
            return Quantized(integers, scale, zero_point, least, most, by_row=True)
        if node.target in MOVES:
            value = self.read(node.args[0])
            if value is not None and value.by_row:
                return self._reshape_rows(node, value)
            op = aten.reshape.default if node.target in RESHAPES else node.target
            args = node.args[1:]
        elif node.target is operator.getitem and node.args[1] == 0:
            pool: Any = node.args[0]
            is_read = pool.target is POOL and pool.args[0].meta["val"].dim() == 4
            value = self.read(pool.args[0]) if is_read else None
            if value is not None and value.by_row:
                return None
            op = torch.ops.ipex.int8_max_pool.default
            args = pool.args[1:]
        else:
            return None
        if value is None:
            return None
        with self.graph.inserting_before(node):
            integers = self.graph.call_function(op, (value.integers, *args), dict(node.kwargs))
        integers.meta["val"] = compute_value(integers)
        return replace(value, integers=integers)

    def _reshape_rows(self, node: Node, value: Quantized) -> Quantized | None:
        """Return the integers of a view that keeps rows whole, None for another move."""
        shape, row = node.meta["val"].shape, value.integers.meta["val"].shape[-1]
        if node.target not in RESHAPES or not same_size(shape[-1], row):
            return None
        sizes: Any = node.args[1]
        with self.graph.inserting_before(node):
            parts = (value.integers, sizes), (value.scale, [*sizes[:-1], 1])
            views = [self.graph.call_function(aten.reshape.default, part) for part in parts]
            for view in views:
                view.meta["val"] = compute_value(view)
        return replace(value, integers=views[0], scale=views[1])


def read_result(node: Node) -> Quantized:
    """Return the integers that a quantizing node makes, with their scale."""
    _, scale, zero_point, least, most, *_ = _arguments(node)
    return Quantized(node, scale, zero_point, least, most)


def read_weight(node: Any) -> Quantized | None:
    """Return the integers that a node dequantizes by a scale of each channel, None for another.

    A transposed matrix has transposed integers, which are added before it.
    """
    node = _without_casts(node)
    if not isinstance(node, Node) or node.op != "call_function":
        return None
    if node.target is aten.permute.default and list(node.args[1]) == [1, 0]:  # type: ignore[arg-type]
        value = read_weight(node.args[0])
        if value is None:
            return None
        with node.graph.inserting_before(node):
            integers = node.graph.call_function(node.target, (value.integers, [1, 0]))
        integers.meta["val"] = compute_value(integers)
        axis = None if value.axis is None else 1 - value.axis
        return replace(value, integers=integers, axis=axis)
    axis = None
    if _calls(node, "dequantize_per_tensor"):
        integers, scale, zero_point, least, most, *_ = _arguments(node)
    elif _calls(node, "dequantize_per_channel"):
        integers, scale, zero_point, axis, least, most, *_ = _arguments(node)
    else:
        return None
    zero_point = None if is_zero(zero_point) else zero_point
    return Quantized(integers, scale, zero_point, least, most, axis)


def _calls(node: Any, name: str) -> bool:
    """Return whether a node calls torch's op `quantized_decomposed::<name>`.

    The overload with bounds as tensors does not count.
    """
    op = node.target if isinstance(node, Node) else None
    if not isinstance(op, torch._ops.OpOverload):
        return False
    is_named = op._schema.name == f"quantized_decomposed::{name}"
    return is_named and op._overloadname in ("default", "tensor")


def is_zero(value: Any) -> bool:
    """Return whether a number is zero, or a node is known to be full of zeros."""
    if not isinstance(value, Node):
        return value is None or bool(value == 0)
    is_full_of_zeros = value.target is aten.full.default and bool(value.args[1] == 0)
    return is_full_of_zeros or value.target is aten.zeros_like.default or _is_less(value)


def _is_less(value: Node) -> bool:
    """Return whether a node is full of zeros as `compute_zeros_from_scales` makes them."""
    source: Any = value.args[0] if value.target is prims.convert_element_type.default else None
    if not isinstance(source, Node) or source.target is not ZEROS:
        return False
    return source.args[0] is source.args[1]


def round_rows(
    x: torch.Tensor,
    scales: torch.Tensor,
    zero_points: torch.Tensor,
    least: int,
    most: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return `quantized_decomposed::quantize_per_token` in ops that Inductor fuses.

    Args:
        x: [..., K].
        scales: [..., 1].
        zero_points: [..., 1].
        least: the least integer.
        most: the largest integer.
        dtype: of the integers.
    """
    steps = x.mul(1.0 / scales).add(zero_points).round()
    return steps.clamp(least, most).to(dtype)


def unround_rows(
    integers: torch.Tensor,
    scales: torch.Tensor,
    zero_points: torch.Tensor,
    least: int,
    most: int,
    dtype: torch.dtype,
    output_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return `quantized_decomposed::dequantize_per_token` in ops that Inductor fuses.

    Args:
        integers: [..., K].
        scales: [..., 1].
        zero_points: [..., 1].
        least: the least integer.
        most: the largest integer.
        dtype: of the integers.
        output_dtype: of the result.
    """
    return ((integers - zero_points) * scales).to(output_dtype)


def decompose_rows(graph: torch.fx.Graph, name: str) -> None:
    """Replace ops on rows with scales, for which Inductor has no code, by pointwise ops.

    Args:
        graph: the graph, changed in place.
        name: `quantize_per_token` or `dequantize_per_token`.
    """
    functions: dict[str, Callable[..., Any]] = {
        "quantize_per_token": round_rows,
        "dequantize_per_token": unround_rows,
    }
    for node in list(graph.nodes):
        if _calls(node, name):
            inline(graph, node, functions[name])


def join_batches(graph: torch.fx.Graph) -> None:
    """Rewrite products of batches with one dequantized weight as products of all their rows.

    Autograd's decompositions make them of linear layers on inputs that are not contiguous.
    """
    for node in graph.find_nodes(op="call_function", target=aten.bmm.default):
        weight = _expanded_weight(node.args[1])
        users: list[Any] = list(node.users)
        if weight is None or len(users) != 1 or users[0].target not in RESHAPES:
            continue
        (view,) = users
        bias, last = _added_bias(view, weight.meta["val"].shape[1])
        with graph.inserting_before(last):
            depth = weight.meta["val"].shape[0]
            # Rules of linear layers match a view of their input.
            whole = graph.call_function(
                aten.clone.default, node.args[:1], {"memory_format": torch.contiguous_format}
            )
            whole.meta["val"] = compute_value(whole)
            rows = _add_call(graph, aten.view.default, whole, [-1, depth])
            op = aten.mm.default if bias is None else aten.addmm.default
            operands = (rows, weight) if bias is None else (bias, rows, weight)
            product = _add_call(graph, op, *operands)
            result = _add_call(graph, aten.view.default, product, view.args[1])
        result.meta = {**last.meta, "val": result.meta["val"]}
        product.meta = {**node.meta, "val": product.meta["val"]}
        last.replace_all_uses_with(result)
    graph.eliminate_dead_code()


def _expanded_weight(node: Any) -> Node | None:
    """Return the transposed dequantized weight [K, N] that `node` repeats, or None."""
    while isinstance(node, Node) and node.target in RESHAPES:
        source: Any = node.args[0]
        if not equal_shapes(node.meta["val"], source.meta["val"]):
            return None
        node = source
    if not isinstance(node, Node) or node.target is not aten.expand.default:
        return None
    weight: Any = node.args[0]
    value = weight.meta["val"]
    if weight.target is not aten.permute.default or value.dim() != 2:
        return None
    is_repeated = [*node.meta["val"].shape[1:]] == [*value.shape] and node.meta["val"].dim() == 3
    return weight if is_repeated and _is_dequantized(weight.args[0]) else None


def _is_dequantized(node: Any) -> bool:
    node = _without_casts(node)
    is_fp8 = isinstance(node, Node) and node.target is torch.ops.ipex.fp8_dequantize.default
    return is_fp8 or _calls(node, "dequantize_per_channel") or is_dequantize(node)


def _added_bias(node: Node, size: int) -> tuple[Node | None, Node]:
    """Return the bias that is added to a result of `size` columns, if any, and the last node."""
    users = list(node.users)
    if len(users) == 1 and users[0].target is aten.add.Tensor and not users[0].kwargs:
        bias: Any = users[0].args[1]
        is_first = users[0].args[0] is node and isinstance(bias, Node)
        if is_first and [*bias.meta["val"].shape] == [size]:
            return bias, users[0]
    return None, node


def _add_call(graph: torch.fx.Graph, target: Any, *args: Any) -> Node:
    call: Node = graph.call_function(target, args)
    call.meta["val"] = compute_value(call)
    return call


def compute_zeros_from_scales(graph: torch.fx.Graph) -> None:
    """Have zero points of weights depend on the scales of weights.

    A constant full of zeros is no work on weights alone; what reads it would not be done once.
    """
    for node in list(graph.nodes):
        if not (_calls(node, "quantize_per_channel") or _calls(node, "dequantize_per_channel")):
            continue
        _, scale, zero_point, *_ = node.args
        if not isinstance(zero_point, Node) or not is_zero(zero_point) or _is_less(zero_point):
            continue
        with graph.inserting_before(node):
            zeros = make_zeros(graph, scale, zero_point.meta["val"].dtype)
        node.replace_input_with(zero_point, zeros)
    graph.eliminate_dead_code()


def make_zeros(graph: torch.fx.Graph, scale: Node, dtype: torch.dtype) -> Node:
    """Return a new node full of zeros, as many as there are scales, that depends on the scales."""
    never = _add_call(graph, ZEROS, scale, scale)
    return _add_call(graph, prims.convert_element_type.default, never, dtype)


def use_signed_integers(graph: torch.fx.Graph) -> None:
    """Quantize activations of GPUs to int8 in place of uint8, with zero points 128 lower.

    Tensor cores multiply integers of one kind, and weights are int8. Values and their roundings
    stay the same. Integers that anything but dequantize nodes reads are left alone.
    """
    for node in list(graph.nodes):
        if not is_quantize(node) or node.meta["val"].dtype != torch.uint8:
            continue
        if not node.meta["val"].is_cuda or not all(map(is_dequantize, node.users)):
            continue
        for each in (*node.users, node):
            x, scale, zero_point, least, most, *_ = _arguments(each)
            if isinstance(zero_point, Node):
                with graph.inserting_before(each):
                    # Zero points of any dtype: one in uint8 has no negative numbers.
                    wide = prims.convert_element_type.default
                    whole = _add_call(graph, wide, zero_point, torch.int32)
                    lower: Any = _add_call(graph, aten.sub.Tensor, whole, SHIFT)
            else:
                lower = zero_point - SHIFT
            numbers = (x, scale, lower, least - SHIFT, most - SHIFT, torch.int8)
            schema: Any = each.target
            named = {a.name for a in schema._schema.arguments[: len(numbers)]}
            each.args = numbers
            each.kwargs = {key: value for key, value in each.kwargs.items() if key not in named}
        node.meta["val"] = node.meta["val"].to(torch.int8)


def _without_casts(node: Any) -> Any:
    while isinstance(node, Node) and node.target in CASTS and _is_float(node):
        if not _is_float(node.args[0]):
            break
        node = node.args[0]
    return node


def _is_float(node: Any) -> bool:
    return isinstance(node, Node) and node.meta["val"].dtype.is_floating_point


def _arguments(node: Node) -> list[Any]:
    """Return the arguments of a call in the order of its schema, without defaults."""
    assert isinstance(node.target, torch._ops.OpOverload)
    named = dict(zip((a.name for a in node.target._schema.arguments), node.args, strict=False))
    named.update(node.kwargs)
    return [named[a.name] for a in node.target._schema.arguments if a.name in named]
