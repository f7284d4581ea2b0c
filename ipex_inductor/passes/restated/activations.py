"""Move an activation behind a convolution before views of the result.

    gelu(transpose(flatten(conv(x)))) => transpose(flatten(gelu(conv(x))))

Networks that take turns between tokens and images (SegFormer, PVT) convolve an image, turn it into
tokens and then activate them. Rules look for the activation right behind the convolution.
"""

from typing import Any

import torch
from torch._dynamo.utils import counters

from ipex_inductor.passes.engine.source import user_line
from ipex_inductor.passes.engine.whole_ops import compute_value
from ipex_inductor.reporting.decisions import GraphReport

Node = torch.fx.Node
aten = torch.ops.aten

NAME = "conv|view"
ACTIVATIONS = (
    aten.gelu.default,
    aten.hardswish.default,
    aten.mish.default,
    aten.relu.default,
    aten.sigmoid.default,
    aten.silu.default,
    aten.tanh.default,
)
# Views that hold every element once.
VIEWS = (
    aten.permute.default,
    aten.squeeze.dim,
    aten.transpose.int,
    aten.unsqueeze.default,
    aten.view.default,
)


def move_before_views(graph: torch.fx.Graph, report: GraphReport) -> None:
    """Move every activation that reads views of a convolution, in place.

    Args:
        graph: A graph of inference.
        report: Gets the decisions.
    """
    for op in ACTIVATIONS:
        for node in graph.find_nodes(op="call_function", target=op):
            convolution = _convolution_before(node)
            if convolution is not None and convolution is not node.args[0]:
                report.add("fired", NAME, "", user_line(node))
                counters["ipex"][NAME] += 1
                _move(graph, node, convolution)


def _convolution_before(node: Node) -> Node | None:
    """Return the convolution whose result only a node reads, through views."""
    source: Any = node.args[0]
    while len(source.users) == 1 and source.target in VIEWS:
        source = source.args[0]
    is_alone = len(source.users) == 1 and source.target is aten.convolution.default
    return source if is_alone else None


def _move(graph: torch.fx.Graph, node: Node, convolution: Node) -> None:
    """Activate the result of a convolution in place of views of it."""
    op: Any = node.target
    arguments: Any = node.args
    views, *options = arguments
    with graph.inserting_after(convolution):
        moved = graph.call_function(op, (convolution, *options), node.kwargs)
    moved.meta = {**node.meta}
    (reader,) = (user for user in convolution.users if user is not moved)
    reader.replace_input_with(convolution, moved)
    moved.meta["val"] = compute_value(moved)
    node.replace_all_uses_with(views)
    graph.erase_node(node)
