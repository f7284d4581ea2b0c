"""Report linear layers on quantized weights: computed by a kernel, or the reason why not."""

from collections.abc import Callable

import torch
from torch._dynamo.utils import counters

from ipex_inductor.ops.common.defining import name_arguments
from ipex_inductor.passes.engine.source import user_line
from ipex_inductor.reporting.decisions import GraphReport

NAME = "weight-only linear"


def report_linears(
    graph: torch.fx.Graph, report: GraphReport, why_not: Callable[[torch.device], str | None]
) -> None:
    """Report for each linear layer on a quantized weight that a kernel computes it, or why not.

    Args:
        graph: the graph.
        report: gets the decisions.
        why_not: returns why the kernel of a device is not available, or None.
    """
    overload = torch.ops.ipex.weight_only_linear.default
    for node in graph.find_nodes(op="call_function", target=overload):
        call = name_arguments(overload, node.args, node.kwargs)
        reason = why_not(node.meta["val"].device)
        subject = f"{NAME}, {call.weight_dtype} in {call.compute}"
        report.add("missed" if reason else "fired", subject, reason or "", user_line(node))
        if reason is None:
            counters["ipex"][NAME] += 1
