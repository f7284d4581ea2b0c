"""Restate single ops on a GPU by ops for which its libraries have faster kernels.

Each row of `RESTATEMENTS` names an op, the cases that are restated, and a function that computes
such a case by other ops. Rules, layouts and kernel choices see the new ops.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo.utils import counters

from ipex_inductor.passes.engine.source import user_line
from ipex_inductor.passes.engine.whole_ops import inline
from ipex_inductor.passes.restated import embedding_bags, frames, patches, windows
from ipex_inductor.reporting.decisions import GraphReport

Node = torch.fx.Node


@dataclass(frozen=True)
class Restatement:
    """One row of the table.

    Args:
        name: The name of the rule, in options and reports.
        target: The op that is restated.
        concerns: Returns whether a node is of the kind that the rule is for.
        why_not: Returns why such a node stays as it is, or None.
        compute: Takes the arguments of the op, and returns its result by other ops.
    """

    name: str
    target: Any
    concerns: Callable[[Node], bool]
    why_not: Callable[[Node], str | None]
    compute: Callable[..., Any]


CONVOLUTION = torch.ops.aten.convolution.default
RESTATEMENTS = (
    Restatement(
        patches.NAME, CONVOLUTION, patches.has_patches, windows.why_not, patches.multiply_patches
    ),
    Restatement(
        frames.NAME, CONVOLUTION, frames.has_frames, windows.why_not, frames.convolve_frames
    ),
    *(
        Restatement(
            embedding_bags.NAME,
            op,
            embedding_bags.has_equal_bags,
            embedding_bags.why_not,
            embedding_bags.gather_bags,
        )
        for op in embedding_bags.OPS
    ),
)
NAMES = frozenset(row.name for row in RESTATEMENTS)


def restate(graph: torch.fx.Graph, off: Collection[str], report: GraphReport) -> None:
    """Apply each row of the table to a graph of inference, in place.

    Args:
        graph: The graph.
        off: Names of rules that are off.
        report: Gets the decisions.
    """
    traced: dict[Any, torch.fx.GraphModule] = {}  # a model repeats its layers
    for row in RESTATEMENTS:
        if row.name in off:
            continue
        for node in graph.find_nodes(op="call_function", target=row.target):
            if not on_nvidia_gpu(node) or not row.concerns(node):
                continue
            reason = row.why_not(node)
            report.add("missed" if reason else "fired", row.name, reason or "", user_line(node))
            if reason is None:
                counters["ipex"][row.name] += 1
                inline(graph, node, row.compute, traced_before=traced)


def on_nvidia_gpu(node: Node) -> bool:
    """Return whether a node computes on a GPU of NVIDIA."""
    first: Any = node.args[0]  # a number that varies is an operand too, and on no device
    return torch.version.hip is None and first.meta["val"].device.type == "cuda"
