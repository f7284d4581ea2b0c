"""Prepare FP8 ops of a graph for their lowerings, and report its GEMMs.

    fp8_quantize(x, scale) => clamp(x * scale) in FP8, and the maximum of maxima of rows of |x|

In inference this is done in the graph, so that quantized weights are computed once. In a joint
graph the op stays: the backward reads the values that the forward wrote.
"""

from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from ipex_inductor.ops.quant import fp8
from ipex_inductor.passes.engine.source import user_line
from ipex_inductor.passes.engine.whole_ops import inline
from ipex_inductor.reporting.decisions import GraphReport

ipex = torch.ops.ipex

NAME = "fp8"


def expand(graph: torch.fx.Graph, report: GraphReport) -> None:
    """Replace quantizations in a graph for inference in place, and report its GEMMs."""
    traced: dict[Any, torch.fx.GraphModule] = {}
    for node in graph.find_nodes(op="call_function", target=ipex.fp8_quantize.default):
        shape = tensors_of(node)[0].meta["val"].shape
        if shape and not any(isinstance(size, int) and size == 0 for size in shape):
            inline(graph, node, _quantize, traced_before=traced)
    report_gemms(graph, report)


def report_gemms(graph: torch.fx.Graph, report: GraphReport) -> None:
    """Report for each GEMM that FP8 tensor cores multiply it, or why not."""
    for node in graph.find_nodes(op="call_function", target=ipex.fp8_gemm.default):
        reason = fp8.why_not_lowered(*(each.meta["val"] for each in tensors_of(node)[:4]))
        report.add("missed" if reason else "fired", NAME, reason or "", user_line(node))
        if reason is None:
            counters["ipex"][NAME] += 1


def tensors_of(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Return the arguments of a call that are nodes, in their order."""
    return [each for each in node.args if isinstance(each, torch.fx.Node)]


def _quantize(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return fp8.quantize(x, scale, dtype), fp8.compute_amax_of_rows(x)
