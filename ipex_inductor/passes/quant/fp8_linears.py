"""Compute linear layers on operands that were rounded to FP8 by GEMMs on the FP8 values.

The pass runs before the fusion rules, which see no linear layer there then. What it leaves keeps
the dequantized operands, so it is right without the pass.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ipex_inductor.ops.quant import fp8_steps
from ipex_inductor.passes.engine.rule import same_size
from ipex_inductor.passes.engine.source import user_line
from ipex_inductor.passes.engine.whole_ops import compute_value, inline, keep_strides
from ipex_inductor.passes.quant.products import READERS
from ipex_inductor.passes.quant.values import CASTS, MOVES, RESHAPES
from ipex_inductor.reporting.decisions import GraphReport

Node = torch.fx.Node
aten, ipex = torch.ops.aten, torch.ops.ipex

NAME = "fp8"
EXACT = (torch.float32, torch.bfloat16)  # dtypes that hold E4M3 numbers times powers of two
ON_GPUS = "each call writes the dequantized weight: no GEMM on GPUs reads FP8 weights yet"
# Ops that Inductor fuses with what writes or reads their values.
POINTWISE: dict[Any, Callable[..., Any]] = {
    ipex.fp8_quantize_tensor.default: fp8_steps.quantize_tensor,
    ipex.fp8_dequantize.default: fp8_steps.dequantize,
}
# Besides, where Python cannot be called; elsewhere the weight preprocessing calls it once.
WITHOUT_PYTHON = {ipex.fp8_quantize_channels.default: fp8_steps.quantize_channels}
OPERANDS = {aten.mm.default: (0, 1), aten.addmm.default: (1, 2), aten.bmm.default: (0, 1)}
WhyNot = Callable[..., str | None]


@dataclass(frozen=True)
class Rounded:
    """Values in E4M3, and the steps that they are multiplied by."""

    values: Node
    steps: Node


def place_linears(graph: torch.fx.Graph, report: GraphReport, why_not: WhyNot) -> None:
    """Replace linear layers on dequantized operands by GEMMs on their FP8 values.

    Args:
        graph: the graph, changed in place.
        report: gets the decisions.
        why_not: returns why FP8 GEMMs of a device are not available, or None; with `calls=False`
            why generated code cannot convert FP8.
    """
    for node in list(graph.nodes):
        if node.target is ipex.fp8_gemm_rows.default:
            report.add("fired", "fp8 linear, scales of rows", where=user_line(node))
        linear = READERS[node.target](node) if node.target in READERS else None
        weight = _read_rounded(linear.weight) if linear and linear.window is None else None
        if linear is None or weight is None or _value(weight.values).dim() != 2:
            if any(_is_rounded(node.args[n]) for n in OPERANDS.get(node.target, ())):
                report.add("missed", "fp8 linear", fp8_steps.LIMITS["operands"], user_line(node))
            continue
        x = _read_rounded(linear.x)
        name = "fp8 weights linear" if x is None else "fp8 linear"
        if reason := why_not(_value(node).device):
            report.add("missed", name, reason, user_line(node))
            continue
        if x is None:
            _place_on_weight(graph, node, linear.x, weight, linear.bias)
            note = "" if _value(node).device.type == "cpu" else ON_GPUS
            report.add("fired", name, note, user_line(node))
        else:
            _place_gemm(graph, node, x, weight, linear.bias)
            report.add("fired", name, where=user_line(node))
    graph.eliminate_dead_code()
    for node in list(graph.nodes):
        if node.target in POINTWISE and why_not(_value(node).device, calls=False) is None:
            inline(graph, node, POINTWISE[node.target])
        elif node.target in WITHOUT_PYTHON:
            device = _value(node)[0].device
            if why_not(device) is not None and why_not(device, calls=False) is None:
                inline(graph, node, WITHOUT_PYTHON[node.target])


def _is_rounded(node: Any) -> bool:
    """Return whether a node holds dequantized values, moved or cast in any way."""
    while isinstance(node, Node) and (node.target in CASTS or node.target in MOVES):
        node = node.args[0]
    return isinstance(node, Node) and node.target is ipex.fp8_dequantize.default


def _read_rounded(node: Any) -> Rounded | None:
    """Return the values in E4M3 that a node has dequantized, None for another node.

    Moves of elements are applied to the values of an activation. Casts are passed if they are
    exact.
    """
    moves: list[Node] = []
    while isinstance(node, Node) and node.target is not ipex.fp8_dequantize.default:
        if node.target in CASTS:
            if _value(node).dtype not in EXACT:
                return None
        elif node.target in MOVES:
            moves.append(node)
        else:
            return None
        node = node.args[0]
    if not isinstance(node, Node):
        return None
    values, steps, dtype = node.args
    if dtype not in (*EXACT, torch.float16) or not isinstance(values, Node):
        return None
    if moves and _value(steps).numel() != 1:
        return None  # steps of channels lie along one dimension
    for move in reversed(moves):
        with move.graph.inserting_before(move):
            op: Any = aten.reshape.default if move.target in RESHAPES else move.target
            values = move.graph.call_function(op, (values, *move.args[1:]), dict(move.kwargs))
        values.meta["val"] = compute_value(values)
    return Rounded(values, steps)  # type: ignore[arg-type]


def _place_on_weight(
    graph: torch.fx.Graph, node: Node, x: Node, weight: Rounded, bias: Node | None
) -> None:
    """Replace a linear layer by one that dequantizes its weight in blocks.

    Args:
        graph: the graph, changed in place.
        node: the linear layer.
        x: the activation [M, K].
        weight: [N, K].
        bias: [N], or None.
    """
    arguments = (x, weight.values, weight.steps, bias)
    with graph.inserting_before(node):
        call = graph.call_function(ipex.fp8_weight_linear.default, arguments)
    _replace(graph, node, node, call)


def _place_gemm(
    graph: torch.fx.Graph, node: Node, x: Rounded, weight: Rounded, bias: Node | None
) -> None:
    """Replace a linear layer, its bias and the cast of its result by a GEMM in FP8.

    Args:
        graph: the graph, changed in place.
        node: the linear layer.
        x: the activation [M, K].
        weight: [N, K].
        bias: [N], or None.
    """
    behind = _follow(node, bias)
    with graph.inserting_before(behind.last):
        arguments = (x.values, weight.values, x.steps, weight.steps, behind.bias, behind.dtype)
        call = graph.call_function(ipex.fp8_linear.default, arguments)
        call.meta["val"] = compute_value(call)
        if behind.shape is not None:
            call.meta = {**node.meta, "val": call.meta["val"]}
            call = graph.call_function(aten.reshape.default, (call, behind.shape))
    _replace(graph, node, behind.last, call)


@dataclass(frozen=True)
class _Behind:
    """Nodes behind a product that are part of its GEMM: a view, the bias, a cast.

    Args:
        last: the last of them, or the product.
        bias: [N], or None.
        dtype: of the result.
        shape: arguments of the view, None without one.
    """

    last: Node
    bias: Node | None
    dtype: torch.dtype
    shape: Any = None


def _follow(node: Node, bias: Node | None) -> _Behind:
    """Return what the GEMM computes behind a product, if each value has one reader."""
    behind = _Behind(node, bias, _value(node).dtype)
    columns = _value(node).shape[-1]
    while len(behind.last.users) == 1:
        (user,) = behind.last.users
        bias, dtype = behind.bias, behind.dtype
        if user.op != "call_function" or user.kwargs:
            break
        if user.target in RESHAPES and same_size(_value(user).shape[-1], columns):
            behind = _Behind(user, bias, dtype, user.args[1])
        elif user.target is aten.add.Tensor and bias is None and _addend(user, behind) is not None:
            behind = _Behind(user, _addend(user, behind), dtype, behind.shape)
        elif user.target in CASTS and _is_rounded_once(user, behind):
            source: Any = None if bias is None else bias.args[0]
            return _Behind(user, source, _value(user).dtype, behind.shape)
        else:
            break
    return behind


def _addend(add: Node, behind: _Behind) -> Node | None:
    """Return what an addition adds to a product if that is a bias, else None."""
    product, bias = add.args
    if product is not behind.last or not isinstance(bias, Node):
        return None
    value, columns = _value(bias), _value(behind.last).shape[-1]
    is_bias = value.dim() == 1 and same_size(value.shape[0], columns)
    return bias if is_bias and value.dtype == behind.dtype else None


def _is_rounded_once(cast: Node, behind: _Behind) -> bool:
    """Return whether a GEMM that writes a cast's dtype adds the same bias.

    It rounds the bias to that dtype first.
    """
    dtype, bias = _value(cast).dtype, behind.bias
    if behind.dtype is not torch.float32 or dtype not in (torch.bfloat16, torch.float16):
        return False
    if bias is None:
        return True
    source: Any = bias.args[0] if bias.target in CASTS else None
    return isinstance(source, Node) and _value(source).dtype is dtype


def _replace(graph: torch.fx.Graph, node: Node, last: Node, call: Node) -> None:
    """Replace `last` by a call of the same shape and strides, made for a product.

    Args:
        graph: the graph, changed in place.
        node: the product.
        last: what is replaced.
        call: the call.
    """
    call.meta = {**node.meta, "val": _value(last)}
    last.replace_all_uses_with(call)
    graph.erase_node(last)
    keep_strides(graph, call)


def _value(node: Any) -> Any:
    return node.meta["val"]
