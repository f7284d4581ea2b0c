"""Quantize the input of several layers once, in joint graphs of training.

    q(x, scale_a), q(x, scale_b)  =>  q(x, scale_a) for both

Layers that read one tensor record the same maxima, so delayed scaling gives them the same scale.
One copy in FP8 then waits for the backward, not one for each layer, and is transposed once there.
Scales differ only if the layers read other tensors in earlier passes: in another graph, or before
a checkpoint was loaded. Then the layers take the scale of the first one until the maxima of those
passes have left the history. A scale and its reciprocal are replaced together.
"""

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from ipex_inductor.passes.engine.source import user_line
from ipex_inductor.passes.quant.fp8_records import COLUMNS, MAXIMA, is_record
from ipex_inductor.passes.quant.values import CASTS, MOVES
from ipex_inductor.reporting.decisions import GraphReport

aten, ipex = torch.ops.aten, torch.ops.ipex
NAME = "fp8 shared input"
OTHERS = "a layer that reads this input records other tensors by the same scale"
UNRECORDED = "no magnitudes are recorded here, so scales of layers may differ"


def share_inputs(graph: Graph, report: GraphReport) -> None:
    """Replace quantizations of a tensor that another one computes, in place."""
    order = {node: n for n, node in enumerate(graph.nodes)}
    sources = _find_sources(graph)
    first: dict[Any, Node] = {}
    for node in graph.find_nodes(op="call_function", target=ipex.fp8_quantize.default):
        key = _describe(node.args[0]), node.args[2]
        other = first.setdefault(key, node)
        pair, other_pair = _scale_pair(node), _scale_pair(other)
        if other is node or pair is None or other_pair is None:
            continue
        if other_pair is not pair:
            recorded, other_recorded = sources.get(node), sources.get(other)
            if recorded is None or recorded != other_recorded:
                reason = UNRECORDED if recorded is None or other_recorded is None else OTHERS
                report.add("missed", NAME, reason, user_line(node))
                continue
            if order[other_pair] > order[pair]:
                continue  # a graph in another order than that of calls
            pair.replace_all_uses_with(other_pair)
        node.replace_all_uses_with(other)
        graph.erase_node(node)
        report.add("fired", NAME, where=user_line(other))


def _scale_pair(node: Node) -> Node | None:
    """Return the scale of a quantization with its reciprocal, [2]; None for another scale."""
    scale: Any = node.args[1]
    is_first = scale.target is aten.select.int and tuple(scale.args[1:]) == (0, 0)
    pair = scale.args[0] if is_first else None
    return pair if isinstance(pair, Node) and pair.meta["val"].shape == (2,) else None


def _find_sources(graph: Graph) -> dict[Node, frozenset[Any]]:
    """Return all tensors whose magnitudes decide on the scale of each quantization.

    Those of a column are tensors that the graph records in it.
    """
    columns: dict[Any, set[Node]] = {}
    for record in graph.nodes:
        if is_record(record):
            kwargs: Any = record.kwargs
            for amax, column in zip(kwargs[MAXIMA], kwargs[COLUMNS], strict=True):
                if amax.target is operator.getitem:
                    columns.setdefault((record.args[0], kwargs["model"], column), set()).add(
                        amax.args[0]
                    )
    result: dict[Node, frozenset[Any]] = {}
    for nodes in columns.values():
        tensors = frozenset(_describe(node.args[0]) for node in nodes)
        for node in nodes:
            result[node] = tensors
    return result


def _describe(node: Any) -> Any:
    """Return what is equal for equal moves and casts of one tensor."""
    if not isinstance(node, Node) or node.target not in (*MOVES, *CASTS):
        return node
    rest = str((node.args[1:], node.kwargs))
    return node.target, _describe(node.args[0]), rest
