"""Linear layers on quantized weights: computed by a kernel, or the reason why not."""

from typing import Any

import torch
from torch._dynamo.utils import counters

from ipex_inductor.ops.common.defining import name_arguments
from ipex_inductor.ops.quant.weight_only_rows import LINEAR, compute_by_size
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
        body, choice = None, ""
        on_gpu = reason is None and node.meta["val"].device.type != "cpu"
        if on_gpu:
            body, _, choice = context.settings.choose(node)
        call = name_arguments(LINEAR, node.args, node.kwargs)
        subject = f"{NAME}, {call.weight_dtype} in {call.compute}"
        kind = "missed" if reason else "fired"
        context.report.add(kind, subject, reason or choice, user_line(node))
        counters["ipex"][NAME] += reason is None
        if on_gpu:
            inline(context.graph, node, body or compute_by_size, context.table, traced, origins=True)


def _why_not(context: PassContext, node: Node) -> str | None:
    """Return why no kernel computes a layer, or None."""
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    values = vars(name_arguments(LINEAR, args, kwargs))
    return context.settings.why_not_quantized["weight only"](node.meta["val"].device, values)
