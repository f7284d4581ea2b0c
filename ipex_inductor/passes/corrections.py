"""What Inductor computes wrongly, said in words that it computes right."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ipex_inductor.decisions import GraphReport
from ipex_inductor.passes.source import user_line
from ipex_inductor.passes.whole_ops import inline

aten = torch.ops.aten

# With `ceil_mode` windows hang over the border. Where padding counts, eager divides by what is
# inside; the backward of Inductor (torch 2.11 to 2.15) by the whole window, unless told a divisor.
POOLS = (aten.avg_pool2d_backward.default, aten.avg_pool3d_backward.default)
REASON = "Inductor's own backward divides by the whole window at the border"


def correct(graph: torch.fx.Graph, report: GraphReport) -> None:
    """Rewrite every node that Inductor would compute wrongly."""
    for op in POOLS:
        for node in graph.find_nodes(op="call_function", target=op):
            *_, ceil_mode, padding_counts, divisor = node.args
            if ceil_mode and padding_counts and divisor is None:
                report.add("fired", "avg_pool_backward", REASON, user_line(node))
                inline(graph, node, partial(_pool_backward, op))


def _pool_backward(
    op: Callable[..., Tensor],
    grad: Tensor,
    x: Tensor,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    ceil_mode: bool,
    padding_counts: bool,
    divisor: Any,
) -> Tensor:
    """The backward with one divisor for all windows, of gradients that are scaled to it."""
    scaled, windows = grad, list(zip(kernel, stride or kernel, padding, strict=True))
    for axis, (size, step, pad) in enumerate(windows, -len(windows)):
        start = torch.arange(grad.shape[axis], device=grad.device) * step - pad
        inside = (start + size).clamp(max=x.shape[axis] + pad) - start
        scaled = scaled * (size / inside).view(-1, *[1] * (-1 - axis))
    whole = math.prod(kernel)
    return op(scaled.to(grad.dtype), x, kernel, stride, padding, ceil_mode, padding_counts, whole)
