"""Products in bf16 and fp16 of an inference graph, computed in fp32 where this CPU has none.

Without AVX-512 oneDNN has no products in 16 bits, with it but without AMX none in fp16, and torch's
own take five to ten times as long as in fp32, its attention in fp16 up to five times. What is
multiplied is made wide, weights by the prologue, and sums are rounded once, behind the epilogue;
where the next product reads them, not at all, as Inductor has it of its own casts.
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
CPUS = frozenset({"x86-64", "x86-64:avx2", "x86-64:avx512_bf16"})  # that were measured
NARROW = frozenset({torch.bfloat16, torch.float16})
PRODUCTS = {*READERS, aten.bmm.default, aten.baddbmm.default}
ATTENTION = frozenset({torch.float16})  # in bf16 torch's takes as long as in fp32
FEW = 8  # rows up to which two tensors that are no weights are as well multiplied as they are
# Numbers of a weight that no cache holds: in fp16 torch multiplies one row by it as fast as it is
# read, which is twice as fast as in fp32.
LARGE = 8 << 20


def dtypes(rules_off: frozenset[str] = frozenset()) -> frozenset[torch.dtype]:
    """Those in which this CPU multiplies in fp32 alone; none where the rule is off."""
    backend: Any = torch.backends.mkldnn
    if {"*", NAME} & rules_off:
        return frozenset()
    here = architecture() in CPUS and backend.is_available() and backend.enabled
    return NARROW - onednn_dtypes() if here else frozenset()


def widen(
    graph: torch.fx.Graph,
    weights: Container[Node],
    narrow: frozenset[torch.dtype],
    report: GraphReport,
    why_not_blocked: Callable[[], str | None] | None,
) -> None:
    """Rewrite products in `narrow` in place, but for those on `weights` that a kernel of ours has.

    `why_not_blocked` says why that is not to be had; without it there is none.
    """
    wide: dict[Node, Node] = {}
    count = 0
    for node in list(graph.nodes):
        if node.target not in PRODUCTS or not _is_narrow(node, narrow):
            continue
        if _by_ours(node, weights, narrow, why_not_blocked):
            continue
        on_weight = any(each in weights for each in node.all_input_nodes)
        if not (_is_a_row(node, narrow) if on_weight else _has_few_rows(node)):
            _compute_wide(graph, node, wide, narrow)
            count += 1
    if count:
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in narrow))
        report.add("choice", NAME, f"{count} products in fp32: this CPU has none in {names}")


def widen_attention(
    graph: torch.fx.Graph, narrow: frozenset[torch.dtype], report: GraphReport
) -> None:
    """Have torch's attention in fp32 where it is slow as it is; the result is rounded once."""
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
    """Whether `node` is in fp32 now: not where its result would lie otherwise."""
    (result,) = node.users
    old = result.meta["val"]
    given = [each for each in node.all_input_nodes if _is_narrow(each, narrow)]
    made = {each: wide.get(each) or _cast_behind(graph, each) for each in given}
    with graph.inserting_before(node):
        call = graph.call_function(
            TORCHS,
            torch.fx.map_arg(node.args, lambda each: made.get(each, each)),
            torch.fx.map_arg(node.kwargs, lambda each: made.get(each, each)),
        )
        values = torch.fx.map_arg((call.args, call.kwargs), lambda each: each.meta["val"])
        call.meta["val"] = TORCHS(*values[0], **values[1])
        first = graph.call_function(operator.getitem, (call, 0))
        first.meta["val"] = call.meta["val"][0]
        rounded = _cast(graph, first, old.dtype)
    if rounded.meta["val"].stride() != old.stride():
        for each in (rounded, first, call, *(made[n] for n in given if n not in wide)):
            graph.erase_node(each)
        return False
    wide |= made
    result.replace_all_uses_with(rounded)
    rounded.meta = dict(result.meta)
    for each in (result, node):
        graph.erase_node(each)
    return True


def _cast_behind(graph: torch.fx.Graph, node: Node) -> Node:
    with graph.inserting_after(node):
        return _cast(graph, node, torch.float32)


def _by_ours(
    node: Node, weights: Container[Node], narrow: frozenset[torch.dtype], why_not: Any
) -> bool:
    """Whether a kernel of ours multiplies `node` as it is."""
    product = _product(node, narrow)
    if product is None or why_not is None or product.weight not in weights:
        return False
    return in_blocks(product) is not None and why_not() is None


def _product(node: Node, narrow: frozenset[torch.dtype]) -> Product | None:
    """`node` as a product on a weight [N, K], if it is one."""
    read = READERS.get(node.target)
    with also_in(narrow):
        return read(node) if read else None


def _compute_wide(
    graph: torch.fx.Graph, node: Node, wide: dict[Node, Node], narrow: frozenset[torch.dtype]
) -> None:
    """`node` in fp32, rounded behind it; `wide` has what was widened before."""
    for given in node.all_input_nodes:
        if _is_narrow(given, narrow):
            _make_wide(graph, given, wide)
    value = node.meta["val"]
    node.args = torch.fx.map_arg(node.args, lambda each: wide.get(each, each))
    known = dict(node.meta)
    node.meta["val"] = value.new_empty_strided(value.shape, value.stride(), dtype=torch.float32)
    with graph.inserting_after(node):
        rounded = _cast(graph, node, value.dtype)
    node.replace_all_uses_with(rounded, delete_user_cb=lambda user: user is not rounded)
    rounded.meta = known
    wide[rounded] = node


def _make_wide(graph: torch.fx.Graph, node: Node, wide: dict[Node, Node]) -> None:
    """Let `wide` have `node`; of a transpose, which a linear layer's weight is, the transpose."""
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
    cast.meta["val"] = CAST(node.meta["val"], dtype)  # which lies densely, whatever that does
    return cast


def _is_narrow(node: Node, narrow: frozenset[torch.dtype]) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype in narrow and value.device.type == "cpu"


def _is_a_row(node: Node, narrow: frozenset[torch.dtype]) -> bool:
    """Of fp16, that torch multiplies as fast by its weight as that is read."""
    product = _product(node, narrow)
    if product is None or not _has_few_rows(node, 1):
        return False
    value: torch.Tensor = product.weight.meta["val"]
    return value.dtype == torch.float16 and value.is_contiguous() and value.numel() >= LARGE


def _has_few_rows(node: Node, few: int = FEW) -> bool:
    """Of a matrix product; a convolution has none."""
    if node.target in (aten.convolution.default, ipex.conv.default):
        return False
    sizes = [*node.meta["val"].shape[:-1]]
    rows = sizes if node.target is ipex.linear.default else sizes[-1:]
    return all(isinstance(size, int) for size in rows) and math.prod(rows) <= few
