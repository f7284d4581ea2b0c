"""Reduce embedding bags on the 8-bit rows of a quantized table."""

import operator
from collections.abc import Callable
from typing import Any

import torch

from ipex_inductor.ops.common.defining import Arguments, name_arguments
from ipex_inductor.passes.engine.source import user_line
from ipex_inductor.passes.engine.whole_ops import compute_value
from ipex_inductor.passes.quant.values import Quantized, read_weight
from ipex_inductor.reporting.decisions import GraphReport

Node = torch.fx.Node
aten, ipex = torch.ops.aten, torch.ops.ipex

NAME = "int8 embedding_bag"
BAGS = (aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
FLOATS = (torch.float32, torch.bfloat16)


def quantize_bags(
    graph: torch.fx.Graph, report: GraphReport, why_not: Callable[[torch.device], str | None]
) -> int:
    """Compute embedding bags of dequantized tables on their integers; return how many.

    Args:
        graph: the graph, changed in place.
        report: gets the decisions.
        why_not: returns why the kernels of a device are not available, or None.
    """
    count = 0
    for bag in [node for node in graph.nodes if node.target in BAGS]:
        table = read_weight(bag.args[0])
        if table is None:
            continue
        reason = why_not_bag(bag, table) or why_not(table.integers.meta["val"].device)
        report.add("missed" if reason else "fired", NAME, reason or "", user_line(bag))
        if not reason:
            _insert_call(graph, bag, table)
            count += 1
    return count


def why_not_bag(bag: Node, table: Quantized) -> str | None:
    """Return why the kernel does not serve a bag on a quantized table, None if it does."""
    call, value = _arguments(bag), table.integers.meta["val"]
    if value.device.type != "cpu":
        return f"no int8 kernel of embedding bags for {value.device.type} yet"
    if value.dtype != torch.int8 or table.zero_point is not None or table.axis not in (None, 0):
        return "kernels take int8 tables with a scale of each row and no zero points"
    if bag.args[0].meta["val"].dtype not in FLOATS:  # type: ignore[union-attr]
        return "kernels have results in fp32 and bf16"
    if any(user.target is not operator.getitem or user.args[1] != 0 for user in bag.users):
        return "the positions of the bags are read too"
    if call.indices.meta["val"].dtype != call.offsets.meta["val"].dtype:
        return "indices and offsets have different dtypes"
    return None


def _arguments(bag: Node) -> Arguments:
    target: Any = bag.target
    return name_arguments(target, bag.args, bag.kwargs)


def _insert_call(graph: torch.fx.Graph, bag: Node, table: Quantized) -> None:
    call = _arguments(bag)
    dtype = bag.args[0].meta["val"].dtype  # type: ignore[union-attr]
    rows = table.integers.meta["val"].shape[0]

    def add(target: Any, *args: Any) -> Node:
        node: Node = graph.call_function(target, args)
        node.meta["val"] = compute_value(node)
        return node

    def as_float(node: Node) -> Node:
        is_float = node.meta["val"].dtype == torch.float32
        convert = torch.ops.prims.convert_element_type.default
        return node if is_float else add(convert, node, torch.float32)

    with graph.inserting_before(bag):
        scales = table.scale
        if not isinstance(scales, Node):
            number, options = scales, dict[str, Any](dtype=torch.float32, device="cpu")
            scales = graph.call_function(aten.full.default, ([rows], number), options)
            with table.integers.meta["val"].fake_mode:
                scales.meta["val"] = torch.full([rows], number, **options)
        elif table.axis is None:
            scales = add(aten.expand.default, add(aten.reshape.default, scales, [1]), [rows])
        weights = call.per_sample_weights
        weights = weights if weights is None else as_float(weights)
        words = [call.mode, int(call.include_last_offset), call.padding_idx], dtype
        operands = table.integers, as_float(scales), call.indices, call.offsets, weights
        result = add(ipex.int8_embedding_bag.default, *operands, *words)
    for user in list(bag.users):
        result.meta = {**user.meta, "val": result.meta["val"]}
        user.replace_all_uses_with(result)
        graph.erase_node(user)
