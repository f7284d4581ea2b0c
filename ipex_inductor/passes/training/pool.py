"""Compute max pools in training on GPUs, forward and backward, by kernels of ours.

In a step of ResNet-50 on an H200 (`benchmarks/train.py`) Inductor's backward of the pool took 729
of 19,740 us, the batch norm with ReLU before the pool and the pool itself 310; memory takes 70 us
each.
"""

import operator
from typing import Any

import torch
from torch import Tensor
from torch._inductor import inductor_prims  # noqa: F401  registers the prims

from ipex_inductor.ops.conv.geometry import image_of, sides
from ipex_inductor.passes.engine.source import user_line
from ipex_inductor.passes.engine.whole_ops import inline
from ipex_inductor.passes.layout.folding import TRAINING as NORMS
from ipex_inductor.reporting.decisions import GraphReport
from ipex_inductor.target.device import current

Node = torch.fx.Node
aten, prims = torch.ops.aten, torch.ops.prims

NAME = "max-pool"
FASTER = {"sm_90"}  # the only architecture where it was measured
WHOLE = frozenset({"max_pool2d_with_indices_backward"})  # from torch 2.12 on it is decomposed
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MOST_WINDOWS = 3  # windows a pixel is in along a dimension, at most: the kernel visits each
LANE = 8  # channels that a thread reads at once


def replace(graph: torch.fx.Graph, report: GraphReport) -> None:
    """Replace every max pool with a backward by kernels of ours, where they support it."""
    backward = aten.max_pool2d_with_indices_backward.default
    for node in graph.find_nodes(op="call_function", target=backward):
        reason = why_not(node)
        if reason is not None:
            report.add("missed", NAME, reason, user_line(node))
            continue
        pool = _pool(node)
        line = user_line(pool)
        masked = _replace_backward(graph, node)
        graph.eliminate_dead_code()
        joined = _join(graph, pool)
        messages = ["its backward by a kernel of ours"]
        messages += ["the mask of the relu before it is as large as its result"] if masked else []
        messages += ["with the batch norm and the relu before it one kernel"] if joined else []
        report.add("fired", NAME, "; ".join(messages), line)


def why_not(node: Any) -> str | None:
    """Return why the kernel does not serve this backward, None where it does."""
    grad, x, *_, indices = node.args
    device = node.meta["val"].device
    if device.type != "cuda" or torch.version.hip:
        return f"no kernel of ours for {'ROCm' if device.type == 'cuda' else device.type}"
    if current(device).arch not in FASTER:
        return f"it was not measured on {current(device).arch}: Inductor's kernel is used"
    if indices.target is not prims._low_memory_max_pool_offsets_to_indices.default:
        return "its indices are positions in the image, not in the window"
    offsets, window, _, stride, _, dilation = indices.args
    pools = [n.target for n in offsets.all_input_nodes]
    if pools != [prims._low_memory_max_pool_with_offsets.default]:
        return "its forward is in another graph"
    values = grad.meta["val"], x.meta["val"], offsets.meta["val"]
    if not all(isinstance(n, int) for value in values for n in value.shape):
        return "its sizes vary"
    if 0 in (*x.meta["val"].shape, *values[0].shape):
        return "a size is zero"
    if x.meta["val"].dim() != 4 or {*dilation} != {1}:
        return "its image has no batch, or its window is dilated"
    if not all(v.is_contiguous(memory_format=torch.channels_last) for v in values[1:]):
        return "its image is not channels-last"
    if x.meta["val"].shape[1] % LANE or values[0].dtype not in DTYPES:
        return f"of {values[0].dtype}, or its channels are no multiple of {LANE}"
    if max(-(-n // step) for n, step in zip(window, stride, strict=True)) > MOST_WINDOWS:
        return "a pixel is in too many windows"
    return None


def _pool(node: Any) -> Any:
    """Return the pool that `node` is the backward of."""
    (pool,) = node.args[-1].args[0].all_input_nodes
    return pool


def _replace_backward(graph: torch.fx.Graph, node: Any) -> bool:
    """Replace the backward of a pool; return whether the ReLU mask behind it is fused."""
    grad, x, *_, indices = node.args
    offsets, window, image, stride, padding, _ = indices.args
    mask = _mask(node, x)
    pooled = mask and _values_of(_pool(node))
    last = mask if pooled else node
    last.target = torch.ops.ipex.max_pool_backward.default
    last.args = (grad, offsets, pooled or None, image, window, stride, padding)
    last.kwargs = {}
    inline(graph, last, backward)
    return bool(pooled)


def backward(
    grad: Tensor,
    offsets: Tensor,
    pooled: Tensor | None,
    image: list[int],
    *window: list[int],
) -> Tensor:
    """Return the gradient of the activation, masked by the signs of `pooled` if that is given.

    A value that the pool selects is the activation at that place. So a mask of the activation's
    signs equals one of the pool's result wherever a gradient goes; all other gradients are zero.

    Args:
        grad: The gradient of the pool's result.
        offsets: The place in the window of each selected value.
        pooled: The pool's result, or None for no mask.
        image: Height and width of the activation.
        window: Kernel, stride and padding.
    """
    if pooled is not None:
        grad = aten.threshold_backward(grad, pooled, 0)
    rows = torch.ops.ipex.max_pool_backward(grad, offsets, image, *window)
    return image_of(rows, len(grad), *image)


def _mask(node: Node, x: Node) -> Any:
    """Return ReLU's backward, masking by the signs of `x`, if it alone reads `node`; else None."""
    if len(node.users) != 1:
        return None
    user: Any = next(iter(node.users))
    if user.target is not aten.where.self:
        return None
    signs, zero, masked = user.args
    below = signs.target is aten.le.Scalar and signs.args[1] == 0 and _origin(signs.args[0]) is x
    return user if below and masked is node and _is_zero(zero) else None


def _origin(node: Any) -> Any:
    while node.target is aten.alias.default:
        node = node.args[0]
    return node


def _is_zero(node: Any) -> bool:
    if node.target is aten.scalar_tensor.default:
        return bool(node.args[0] == 0)
    return node.target is aten.full.default and node.args[:2] == ([], 0)


def _values_of(pool: Any) -> Any:
    """Return the values of a pool, the first of its results; None if they are not read."""
    values = (u for u in pool.users if u.target is operator.getitem and u.args[1] == 0)
    return next(values, None)


def _join(graph: torch.fx.Graph, pool: Any) -> bool:
    """Fuse a pool with the batch norm and ReLU before it, if they have no other readers."""
    relu, window, stride, padding, *_ = pool.args
    if relu.target is not aten.relu.default or len(relu.users) != 1:
        return False
    normed = relu.args[0]
    if normed.target is not operator.getitem or len(normed.users) != 1:
        return False
    norm = normed.args[0]
    if norm.target not in NORMS:
        return False
    x, weight, bias = norm.args[:3]
    value = x.meta["val"]
    mean, rstd = (_result(graph, norm, i) for i in (1, 2))
    factors = mean, rstd, weight, bias
    plain = all(n is not None and n.meta["val"].dtype == torch.float32 for n in factors)
    plain &= pool.meta["val"][0].shape[2:] == sides(value.shape[2:], window, stride, padding)
    last = value.is_contiguous(memory_format=torch.channels_last)
    if not (plain and last and value.dtype == normed.meta["val"].dtype):
        return False
    pool.args = (x, *factors, window, stride, padding)
    inline(graph, pool, forward)
    graph.eliminate_dead_code()
    return True


def _result(graph: torch.fx.Graph, norm: Any, index: int) -> Any:
    """Return the result of a batch norm with this index."""
    for user in norm.users:
        if user.target is operator.getitem and user.args[1] == index:
            return user
    with graph.inserting_after(norm):
        result = graph.call_function(operator.getitem, (norm, index))
    result.meta["val"] = norm.meta["val"][index]
    return result


def forward(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Return the pool's values and offsets, as torch's own op does."""
    *_, window, stride, padding = rest
    size = sides(x.shape[2:], window, stride, padding)
    pooled, offsets = torch.ops.ipex.norm_relu_pool(x, *rest)
    return image_of(pooled, len(x), *size), image_of(offsets, len(x), *size)
