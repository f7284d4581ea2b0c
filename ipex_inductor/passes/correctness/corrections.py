"""What Inductor computes wrongly, said in words that it computes right."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ipex_inductor import compat
from ipex_inductor.passes.engine.source import user_line
from ipex_inductor.passes.engine.whole_ops import inline
from ipex_inductor.reporting.decisions import GraphReport

aten = torch.ops.aten


@dataclass(frozen=True)
class Correction:
    """One fault of Inductor.

    Args:
        name: the name in reports.
        reason: what Inductor does.
        ops: the ops that it compiles wrongly.
        concerns: tells of a node whether the fault shows there.
        right: computes what the op does, called with the op and its arguments.
    """

    name: str
    reason: str
    ops: tuple[Callable[..., Any], ...]
    concerns: Callable[[torch.fx.Node], bool]
    right: Callable[..., Any]


def correct(graph: torch.fx.Graph, report: GraphReport) -> None:
    """Rewrite every node that Inductor would compute wrongly."""
    for fault in CORRECTIONS:
        for op in fault.ops:
            for node in graph.find_nodes(op="call_function", target=op):
                if fault.concerns(node):
                    report.add("fired", fault.name, fault.reason, user_line(node))
                    inline(graph, node, partial(fault.right, op))


def _hangs_over_the_border(node: torch.fx.Node) -> bool:
    """Return whether windows hang over the border (`ceil_mode`) and padding counts.

    Eager then divides by what is inside, the backward of Inductor by the whole window, unless a
    divisor is given.
    """
    *_, ceil_mode, padding_counts, divisor = node.args
    return bool(ceil_mode and padding_counts and divisor is None)


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


def _may_be_of_nothing(node: torch.fx.Node) -> bool:
    """Return whether there may be no elements to take the mean of."""
    x, dims = node.args[0], node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    if not isinstance(x, torch.fx.Node):
        return False
    shape = x.meta["val"].shape
    axes = dims if isinstance(dims, (list, tuple)) and dims else range(len(shape))
    return not all(statically_known_true(shape[axis] > 0) for axis in axes)


def _mean_apart(
    op: Callable[..., tuple[Tensor, Tensor]],
    x: Tensor,
    dim: list[int] | None = None,
    correction: float | None = None,
    keepdim: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the variance and the mean, not of one reduction: none of no elements has a mean."""
    variance, _ = op(x, dim, correction=correction, keepdim=keepdim)
    return variance, x.mean(dim or [*range(x.ndim)], keepdim)


def _samples_in_order(
    op: Callable[..., tuple[Tensor, Tensor]],
    x: Tensor,
    kernel: list[int],
    size: list[int],
    samples: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the pooled values and their places, by the sample that eager takes of each axis."""
    return op(x, kernel, size, samples.flip(-1))


def _is_scaled(node: torch.fx.Node) -> bool:
    """Return whether what is subtracted has a factor."""
    return bool((node.args[2] if len(node.args) > 2 else node.kwargs.get("alpha", 1)) != 1)


def _add_negated(
    op: Callable[..., list[Tensor]], tensors: list[Tensor], others: list[Tensor], alpha: float = 1
) -> list[Tensor]:
    """Return the differences as sums with the factor negated, rounded the same."""
    result: list[Tensor] = aten._foreach_add.List(tensors, others, alpha=-alpha)
    return result


CORRECTIONS = (
    Correction(
        name="_foreach_sub",
        reason="Inductor ignores the factor of what is subtracted (seen in torch 2.11)",
        ops=(aten._foreach_sub.List,),
        concerns=_is_scaled,
        right=_add_negated,
    ),
    Correction(
        name="avg_pool_backward",
        reason="Inductor's own backward divides by the whole window at the border",
        ops=(aten.avg_pool2d_backward.default, aten.avg_pool3d_backward.default),
        concerns=_hangs_over_the_border,
        right=_pool_backward,
    ),
    Correction(
        name="var_mean",
        reason="Inductor's mean of no elements is 0 beside a variance, not nan",
        ops=(aten.var_mean.correction,),
        concerns=_may_be_of_nothing,
        right=_mean_apart,
    ),
    Correction(
        name="fractional_max_pool3d",
        reason="Inductor takes the random samples of depth and width for one another",
        ops=(aten.fractional_max_pool3d.default,),
        concerns=lambda node: compat.reads_samples_backwards(),
        right=_samples_in_order,
    ),
)
