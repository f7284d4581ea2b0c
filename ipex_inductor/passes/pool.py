"""The backward of a max pool in training on GPUs: a kernel of ours, behind a mask of its own size.

Of ResNet-50's step on an H200 (`benchmarks/train.py`) Inductor's kernel took 729 of 19,740 us,
where reading and writing take 70.
"""

import operator
from typing import Any

import torch
from torch import Tensor
from torch._inductor import inductor_prims  # noqa: F401  registers the prims

from ipex_inductor.decisions import GraphReport
from ipex_inductor.passes.source import user_line
from ipex_inductor.passes.whole_ops import inline
from ipex_inductor.target import current

Node = torch.fx.Node
aten, prims = torch.ops.aten, torch.ops.prims

NAME = "max-pool-backward"
FASTER = {"sm_90"}  # nobody measured it elsewhere
WHOLE = frozenset({"max_pool2d_with_indices_backward"})  # from torch 2.12 on it is decomposed
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MOST_WINDOWS = 3  # that a pixel is in, to a side: the kernel asks each
LANE = 8  # channels that a thread reads at once


def replace(graph: torch.fx.Graph, report: GraphReport) -> None:
    """Give every backward of a max pool that it is for to `ipex::max_pool_backward`."""
    changed = False
    backward = aten.max_pool2d_with_indices_backward.default
    for node in graph.find_nodes(op="call_function", target=backward):
        reason = why_not(node)
        if reason is not None:
            report.add("missed", NAME, reason, user_line(node))
            continue
        _replace(graph, node, report)
        changed = True
    if changed:
        graph.eliminate_dead_code()


def why_not(node: Any) -> str | None:
    """Why the kernel is not for this backward, None where it is."""
    grad, x, *_, indices = node.args
    device = node.meta["val"].device
    if device.type != "cuda" or torch.version.hip:
        return f"no kernel of ours for {'ROCm' if device.type == 'cuda' else device.type}"
    if current(device).arch not in FASTER:
        return f"nobody measured it on {current(device).arch}: Inductor's own is kept"
    if indices.target is not prims._low_memory_max_pool_offsets_to_indices.default:
        return "it is told where in the image each value was, not where in its window"
    offsets, window, _, stride, _, dilation = indices.args
    values = grad.meta["val"], x.meta["val"], offsets.meta["val"]
    if not all(isinstance(n, int) for value in values for n in value.shape):
        return "its sizes vary"
    if x.meta["val"].dim() != 4 or {*dilation} != {1}:
        return "its image has no batch, or its window is dilated"
    if not all(v.is_contiguous(memory_format=torch.channels_last) for v in values[1:]):
        return "its image is not channels-last"
    if x.meta["val"].shape[1] % LANE or values[0].dtype not in DTYPES:
        return f"of {values[0].dtype}, or its channels are no multiple of {LANE}"
    if max(-(-n // step) for n, step in zip(window, stride, strict=True)) > MOST_WINDOWS:
        return "a pixel is in too many windows"
    return None


def _replace(graph: torch.fx.Graph, node: Any, report: GraphReport) -> None:
    grad, x, *_, indices = node.args
    offsets, window, image, stride, padding, _ = indices.args
    mask = _mask(node, x)
    pooled = mask and _pooled(offsets)
    last = mask if pooled else node
    last.target = torch.ops.ipex.max_pool_backward.default
    last.args = (grad, offsets, pooled or None, image, window, stride, padding)
    last.kwargs = {}
    said = "by a kernel of ours"
    if pooled:
        said += ", behind the mask of the relu before the pool, which is as large as its result"
    report.add("fired", NAME, said, user_line(node))
    inline(graph, last, backward)


def backward(
    grad: Tensor,
    offsets: Tensor,
    pooled: Tensor | None,
    image: list[int],
    *around: list[int],
) -> Tensor:
    """The gradient of the image, masked by where `pooled`, if that is given, is positive.

    A value that a pool takes is that of the image in this place, so a mask of the image's signs is
    one of the pool's, wherever a gradient goes; all else is zero.
    """
    if pooled is not None:
        grad = aten.threshold_backward(grad, pooled, 0)
    rows = torch.ops.ipex.max_pool_backward(grad, offsets, image, *around)
    batch, channels, *_ = grad.shape
    made: Tensor = rows.view(batch, *image, channels).permute(0, 3, 1, 2)
    return made


def _mask(node: Node, x: Node) -> Any:
    """Relu's backward, which masks by the signs of `x`, if that alone reads `node`; else None."""
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


def _pooled(offsets: Node) -> Node | None:
    """What the pool made, beside where from."""
    (pool,) = offsets.all_input_nodes
    made = (u for u in pool.users if u.target is operator.getitem and u.args[1] == 0)
    return next(made, None)
