"""Rewrite ops that Inductor computes wrongly as ops that it computes right."""

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
LEFT_TO_TORCH = "should_fallback"  # in the meta of a node: Inductor calls torch's kernel


@dataclass(frozen=True)
class Correction:
    """A fault of Inductor and its correction.

    Args:
        name: The name in reports.
        reason: What Inductor does.
        ops: The ops that it compiles wrongly.
        concerns: Returns whether the fault shows at a node.
        right: Computes what the op does, called with the op and its arguments; None if torch's own
            kernel is called.
    """

    name: str
    reason: str
    ops: tuple[Callable[..., Any], ...]
    concerns: Callable[[torch.fx.Node], bool]
    right: Callable[..., Any] | None


def correct(graph: torch.fx.Graph, report: GraphReport) -> None:
    """Rewrite every node that Inductor would compute wrongly."""
    for fault in CORRECTIONS:
        for op in fault.ops:
            for node in graph.find_nodes(op="call_function", target=op):
                if fault.concerns(node):
                    report.add("fired", fault.name, fault.reason, user_line(node))
                    if fault.right is None:
                        node.meta[LEFT_TO_TORCH] = True
                    else:
                        inline(graph, node, partial(fault.right, op))


def _hangs_over_the_border(node: torch.fx.Node) -> bool:
    """Return whether windows extend over the border (`ceil_mode`) and padding counts.

    Unless a divisor is given, eager then divides by the part inside, and Inductor's backward by the
    whole window.
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
    """Return the backward with one divisor for all windows, of gradients scaled to it.

    Args:
        op: The backward op.
        grad: The gradient of the pool's result.
        x: The pool's input.
        kernel: The window along each dimension.
        stride: The stride along each dimension; empty for the window.
        padding: The padding along each dimension.
        ceil_mode: Whether windows may extend over the border.
        padding_counts: Whether the divisor counts padding.
        divisor: The given divisor, which is None here.
    """
    scaled, windows = grad, list(zip(kernel, stride or kernel, padding, strict=True))
    for axis, (size, step, pad) in enumerate(windows, -len(windows)):
        start = torch.arange(grad.shape[axis], device=grad.device) * step - pad
        inside = (start + size).clamp(max=x.shape[axis] + pad) - start
        scaled = scaled * (size / inside).view(-1, *[1] * (-1 - axis))
    whole = math.prod(kernel)
    return op(scaled.to(grad.dtype), x, kernel, stride, padding, ceil_mode, padding_counts, whole)


def _may_be_of_nothing(node: torch.fx.Node) -> bool:
    """Return whether the mean may be of no elements."""
    x, dims = node.args[0], node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    if not isinstance(x, torch.fx.Node):
        return False
    shape = x.meta["val"].shape
    axes = dims if isinstance(dims, (list, tuple)) and dims else range(len(shape))
    return not all(statically_known_true(shape[axis] > 0) for axis in axes)


def _compute_mean_separately(
    op: Callable[..., tuple[Tensor, Tensor]],
    x: Tensor,
    dim: list[int] | None = None,
    correction: float | None = None,
    keepdim: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the variance and the mean by two reductions; the mean of no elements is then nan.

    Args:
        op: The op `var_mean`.
        x: The input.
        dim: The dimensions to reduce; None or empty for all.
        correction: The correction of the variance.
        keepdim: Whether reduced dimensions stay.
    """
    variance, _ = op(x, dim, correction=correction, keepdim=keepdim)
    return variance, x.mean(dim or [*range(x.ndim)], keepdim)


def _is_scaled(node: torch.fx.Node) -> bool:
    """Return whether the subtrahend has a factor."""
    return bool((node.args[2] if len(node.args) > 2 else node.kwargs.get("alpha", 1)) != 1)


def _add_negated(
    op: Callable[..., list[Tensor]],
    tensors: list[Tensor],
    subtrahends: list[Tensor],
    alpha: float = 1,
) -> list[Tensor]:
    """Return the differences as sums with the factor negated; they round identically."""
    result: list[Tensor] = aten._foreach_add.List(tensors, subtrahends, alpha=-alpha)
    return result


def _is_on_cpu(node: torch.fx.Node) -> bool:
    return bool(node.meta["val"].device.type == "cpu")


def _quantize(
    op: Callable[..., Tensor],
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    least: int,
    most: int,
    dtype: torch.dtype,
) -> Tensor:
    """Return integers of a tensor as eager rounds them, within the bounds that are given.

    Args:
        op: The op that quantizes.
        x: The tensor.
        scale: One element.
        zero_point: One element.
        least: The least integer.
        most: The largest integer.
        dtype: The dtype of the integers.
    """
    steps = torch.round(x.to(torch.float32) * (1.0 / scale.to(torch.float32))) + zero_point
    return steps.clamp(least, most).to(dtype)


CORRECTIONS = (
    Correction(
        name="quantize_per_tensor",
        reason="Inductor's code for CPUs has no bounds but those of the dtype, and rounds later",
        ops=(compat.quantized_ops().quantize_per_tensor.tensor,),
        concerns=_is_on_cpu,
        right=_quantize,
    ),
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
        right=_compute_mean_separately,
    ),
    Correction(
        name="fractional_max_pool",
        reason="Inductor computes the windows in float64, torch in the dtype of the samples; and "
        "in some versions it takes the samples of depth and width for one another",
        ops=(aten.fractional_max_pool2d.default, aten.fractional_max_pool3d.default),
        concerns=lambda node: compat.is_lowered(node.target),  # type: ignore[arg-type]
        right=None,
    ),
)
