"""Compute bf16 and fp16 products of an inference graph in fp32, where the CPU lacks such products.

Without AVX-512 oneDNN has no products in 16 bits, with it but without AMX none in fp16, and torch's
own take five to ten times as long as in fp32, its attention in fp16 up to five times. Operands are
upcast, weights by the prologue, and sums are rounded once, behind the epilogue. Where the next
product reads them they are not rounded at all, as Inductor treats its own casts.
"""

import math
import operator
from collections.abc import Callable, Container
from typing import Any

import torch

from ipex_inductor.passes.attention.short_attention import TORCHS
from ipex_inductor.passes.weights.blocked import in_blocks
from ipex_inductor.passes.weights.packing import (
    READERS,
    Product,
    also_in,
    is_transpose,
    onednn_dtypes,
)
from ipex_inductor.reporting.decisions import GraphReport
from ipex_inductor.target.device import architecture

Node = torch.fx.Node
aten, ipex = torch.ops.aten, torch.ops.ipex
CAST = torch.ops.prims.convert_element_type.default

NAME = "wide-products"
CPUS = frozenset({"x86-64", "x86-64:avx2", "x86-64:avx512_bf16"})  # measured
NARROW = frozenset({torch.bfloat16, torch.float16})
PRODUCTS = {*READERS, aten.bmm.default, aten.baddbmm.default}
ATTENTION = frozenset({torch.float16})  # in bf16 torch's takes as long as in fp32
FEW = 8  # the most rows for which two tensors that are no weights are multiplied in 16 bits
# Elements of a weight that no cache holds: in fp16 torch multiplies one row by it as fast as it is
# read, which is twice as fast as in fp32.
LARGE = 8 << 20


def dtypes(rules_off: frozenset[str] = frozenset()) -> frozenset[torch.dtype]:
    """Return the dtypes in which this CPU multiplies in fp32 only; none where the rule is off."""
    backend: Any = torch.backends.mkldnn
    if {"*", NAME} & rules_off:
        return frozenset()
    is_supported = architecture() in CPUS and backend.is_available() and backend.enabled
    return NARROW - onednn_dtypes() if is_supported else frozenset()


def widen(
    graph: torch.fx.Graph,
    weights: Container[Node],
    narrow: frozenset[torch.dtype],
    report: GraphReport,
    why_not_blocked: Callable[[], str | None] | None,
) -> None:
    """Upcast products in `narrow` in place, except products on `weights` that our kernel computes.

    Args:
        graph: The graph.
        weights: Nodes that are weights, or computed from weights alone.
        narrow: The dtypes to upcast.
        report: Gets the decision.
        why_not_blocked: Returns why our kernel is not available; None disables it.
    """
    wide: dict[Node, Node] = {}
    count = 0
    for node in list(graph.nodes):
        if node.target not in PRODUCTS or not _is_narrow(node, narrow):
            continue
        if _by_ours(node, weights, narrow, why_not_blocked):
            continue
        on_weight = any(source in weights for source in node.all_input_nodes)
        if not (_is_a_row(node, narrow) if on_weight else _has_few_rows(node)):
            _compute_wide(graph, node, wide, narrow)
            count += 1
    if count:
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in narrow))
        report.add("choice", NAME, f"{count} products in fp32: this CPU has none in {names}")


def widen_attention(
    graph: torch.fx.Graph, narrow: frozenset[torch.dtype], report: GraphReport
) -> None:
    """Compute torch's attention in fp32 where it is slow in `narrow`; round the result once."""
    wide: dict[Node, Node] = {}
    count = 0
    for node in graph.find_nodes(op="call_function", target=TORCHS):
        users = [(user.target, user.args[1]) for user in node.users]
        if users == [(operator.getitem, 0)] and _is_narrow(node.args[0], narrow & ATTENTION):
            count += _attend_wide(graph, node, wide, narrow)
    if count:
        report.add(
            "choice", NAME, f"attention in fp32, {count} times: torch's in float16 is slow here"
        )


def _attend_wide(
    graph: torch.fx.Graph, node: Node, wide: dict[Node, Node], narrow: frozenset[torch.dtype]
) -> bool:
    """Compute attention in fp32; return whether that was done.

    It is not done where the result's strides would change.
    """
    (result,) = node.users
    old = result.meta["val"]
    sources = [operand for operand in node.all_input_nodes if _is_narrow(operand, narrow)]
    casts = {operand: wide.get(operand) or _cast_behind(graph, operand) for operand in sources}
    with graph.inserting_before(node):
        call = graph.call_function(
            TORCHS,
            torch.fx.map_arg(node.args, lambda operand: casts.get(operand, operand)),
            torch.fx.map_arg(node.kwargs, lambda operand: casts.get(operand, operand)),
        )
        values = torch.fx.map_arg((call.args, call.kwargs), lambda operand: operand.meta["val"])
        call.meta["val"] = TORCHS(*values[0], **values[1])
        first = graph.call_function(operator.getitem, (call, 0))
        first.meta["val"] = call.meta["val"][0]
        rounded = _cast(graph, first, old.dtype)
    if rounded.meta["val"].stride() != old.stride():
        for unused in (rounded, first, call, *(casts[n] for n in sources if n not in wide)):
            graph.erase_node(unused)
        return False
    wide |= casts
    result.replace_all_uses_with(rounded)
    rounded.meta = dict(result.meta)
    for unused in (result, node):
        graph.erase_node(unused)
    return True


def _cast_behind(graph: torch.fx.Graph, node: Node) -> Node:
    with graph.inserting_after(node):
        return _cast(graph, node, torch.float32)


def _by_ours(
    node: Node, weights: Container[Node], narrow: frozenset[torch.dtype], why_not: Any
) -> bool:
    """Return whether a kernel of ours multiplies `node` in its own dtype."""
    product = _product(node, narrow)
    if product is None or why_not is None or product.weight not in weights:
        return False
    return in_blocks(product) is not None and why_not() is None


def _product(node: Node, narrow: frozenset[torch.dtype]) -> Product | None:
    """Return `node` as a product on a weight [N, K], None if it is no such product."""
    read = READERS.get(node.target)
    with also_in(narrow):
        return read(node) if read else None


def _compute_wide(
    graph: torch.fx.Graph, node: Node, wide: dict[Node, Node], narrow: frozenset[torch.dtype]
) -> None:
    """Compute `node` in fp32 and round it behind; `wide` maps nodes to their upcast ones."""
    for source in node.all_input_nodes:
        if _is_narrow(source, narrow):
            _make_wide(graph, source, wide)
    value = node.meta["val"]
    node.args = torch.fx.map_arg(node.args, lambda operand: wide.get(operand, operand))
    meta = dict(node.meta)
    node.meta["val"] = value.new_empty_strided(value.shape, value.stride(), dtype=torch.float32)
    with graph.inserting_after(node):
        rounded = _cast(graph, node, value.dtype)
    node.replace_all_uses_with(rounded, delete_user_cb=lambda user: user is not rounded)
    rounded.meta = meta
    wide[rounded] = node


def _make_wide(graph: torch.fx.Graph, node: Node, wide: dict[Node, Node]) -> None:
    """Add the upcast of `node` to `wide`.

    Of a transpose, as a linear layer's weight is, the source is upcast, and then transposed.
    """
    if node in wide:
        return
    with graph.inserting_after(node):
        if not is_transpose(node):
            wide[node] = _cast(graph, node, torch.float32)
            return
        wide[node] = transpose = graph.node_copy(node)
    (source,) = node.all_input_nodes
    _make_wide(graph, source, wide)
    transpose.args = (wide[source], *node.args[1:])
    transpose.meta = {"val": wide[source].meta["val"].t()}


def _cast(graph: torch.fx.Graph, node: Node, dtype: torch.dtype) -> Node:
    cast = graph.call_function(CAST, (node, dtype))
    cast.meta["val"] = CAST(node.meta["val"], dtype)  # dense, whatever the strides of `node`
    return cast


def _is_narrow(node: Node, narrow: frozenset[torch.dtype]) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype in narrow and value.device.type == "cpu"


def _is_a_row(node: Node, narrow: frozenset[torch.dtype]) -> bool:
    """Return whether torch multiplies one fp16 row by its weight as fast as the weight is read."""
    product = _product(node, narrow)
    if product is None or not _has_few_rows(node, 1):
        return False
    value: torch.Tensor = product.weight.meta["val"]
    return value.dtype == torch.float16 and value.is_contiguous() and value.numel() >= LARGE


def _has_few_rows(node: Node, few: int = FEW) -> bool:
    """Return whether a matrix product has at most `few` rows; a convolution never has."""
    if node.target in (aten.convolution.default, ipex.conv.default):
        return False
    sizes = [*node.meta["val"].shape[:-1]]
    rows = sizes if node.target is ipex.linear.default else sizes[-1:]
    return all(isinstance(size, int) for size in rows) and math.prod(rows) <= few
