"""Linear layers on quantized weights: computed by a kernel, or the reason why not."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from ipex_inductor.ops.common.defining import name_arguments
from ipex_inductor.ops.quant.weight_only_rows import (
    LINEAR,
    MOST_ROWS,
    compute,
    dequantize,
    has_many_rows,
)
from ipex_inductor.passes.engine.source import user_line
from ipex_inductor.passes.engine.whole_ops import inline
from ipex_inductor.passes.pass_context import PassContext

NAME = "weight-only linear"
Node = torch.fx.Node


def place_linears(context: PassContext) -> None:
    """Replace linear layers on quantized weights on GPUs by a kernel; report all of them.

    A layer on a CPU stays whole, as its lowering calls the kernel. So does one that no kernel
    computes: the weight preprocessing would keep what a dequantization makes.

    Args:
        context: of the graph, which is changed in place.
    """
    traced: dict[Any, torch.fx.GraphModule] = {}  # a model repeats its layers
    for node in context.graph.find_nodes(op="call_function", target=LINEAR):
        reason = _why_not(context, node)
        kind, body = "missed" if reason else "fired", None
        if kind == "fired" and node.meta["val"].device.type != "cpu":
            kind, reason, body = _choose(context, node)
        call = name_arguments(LINEAR, node.args, node.kwargs)
        subject = f"{NAME}, {call.weight_dtype} in {call.compute}"
        context.report.add(kind, subject, reason or "", user_line(node))
        counters["ipex"][NAME] += kind == "fired"
        if body is not None:
            inline(context.graph, node, body, context.table, traced, origins=True)


def _choose(context: PassContext, node: Node) -> tuple[str, str, Callable[..., Tensor] | None]:
    """Return the kind and reason of the decision, and what computes a layer on a GPU.

    The last is None for a library's GEMM on the dequantized weight, which the lowering calls.
    """
    body, _, reason = context.settings.choose(node)
    x = node.args[0]
    assert isinstance(x, Node)
    is_large = has_many_rows(x.meta["val"])
    if body is None and is_large:
        reason = f"{reason}; over {MOST_ROWS} rows a library multiplies the dequantized weight"
    if body is dequantize or (body is None and is_large):
        return "choice", reason, None
    return "fired", reason, body or partial(compute, [])


def _why_not(context: PassContext, node: Node) -> str | None:
    """Return why no kernel computes a layer, or None."""
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    values = vars(name_arguments(LINEAR, args, kwargs))
    return context.settings.why_not_quantized["weight only"](node.meta["val"].device, values)
