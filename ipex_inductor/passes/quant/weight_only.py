"""Linear layers on quantized weights: computed by a kernel, or the reason why not."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from ipex_inductor.ops.common.defining import name_arguments
from ipex_inductor.ops.quant.weight_only_rows import (
    LINEAR,
    MOST_ROWS,
    compute_by_size,
    dequantize,
    has_many_rows,
)
from ipex_inductor.passes.engine.source import user_line
from ipex_inductor.passes.engine.whole_ops import Table, inline
from ipex_inductor.reporting.decisions import GraphReport

NAME = "weight-only linear"
Node = torch.fx.Node
# As in `passes/fusion/joined.py`: the body of a chosen call, the kind and reason of the decision.
Choose = Callable[[Node], tuple[Callable[..., Tensor] | None, str, str]]


def place_linears(
    graph: torch.fx.Graph,
    choose: Choose,
    why_not: Callable[..., str | None],
    table: Table,
    report: GraphReport,
) -> None:
    """Replace linear layers on quantized weights on GPUs by a kernel; report all of them.

    A layer on a CPU stays whole, as its lowering calls the kernel. So does one that no kernel
    computes: the weight preprocessing would keep what a dequantization makes.

    Args:
        graph: the inference graph, changed in place.
        choose: returns the chosen call for a node, with the kind and the reason of the decision.
        why_not: returns why no kernel computes a layer on a device, or None.
        table: decompositions for the kernels' bodies.
        report: gets the decisions.
    """
    traced: dict[Any, torch.fx.GraphModule] = {}  # a model repeats its layers
    for node in graph.find_nodes(op="call_function", target=LINEAR):
        reason = why_not(node.meta["val"].device, _values(node))
        kind, body = "missed" if reason else "fired", None
        if kind == "fired" and node.meta["val"].device.type != "cpu":
            kind, reason, body = _choose(choose, node)
        call = name_arguments(LINEAR, node.args, node.kwargs)
        subject = f"{NAME}, {call.weight_dtype} in {call.compute}"
        report.add(kind, subject, reason or "", user_line(node))
        counters["ipex"][NAME] += kind == "fired"
        if body is not None:
            inline(graph, node, body, table, traced, origins=True)


def _choose(choose: Choose, node: Node) -> tuple[str, str, Callable[..., Tensor] | None]:
    """Return the kind and reason of the decision, and what computes a layer on a GPU.

    The last is None for a library's GEMM on the dequantized weight, which the lowering calls.
    """
    body, _, reason = choose(node)
    is_large = has_many_rows(_values(node)["x"])
    if body is None and is_large:
        reason = f"{reason}; over {MOST_ROWS} rows a library multiplies the dequantized weight"
    if body is dequantize or (body is None and is_large):
        return "choice", reason, None
    return "fired", reason, body or compute_by_size


def _values(node: Node) -> dict[str, Any]:
    """Return the arguments of a layer by name, tensors as fake values."""
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    return vars(name_arguments(LINEAR, args, kwargs))
