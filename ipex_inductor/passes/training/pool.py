"""Max pools in training on GPUs: a kernel of ours with what is before it, and one for its backward.

Of ResNet-50's step on an H200 (`benchmarks/train.py`) Inductor's backward of the pool took 729 of
19,740 us, the batch norm with relu before the pool and the pool itself 310; memory takes 70 each.
"""

import operator
from typing import Any

import torch
from torch import Tensor
from torch._inductor import inductor_prims  # noqa: F401  registers the prims

from ipex_inductor.ops.stem import image_of, sides
from ipex_inductor.passes.engine.source import user_line
from ipex_inductor.passes.engine.whole_ops import inline
from ipex_inductor.passes.layout.folding import TRAINING as NORMS
from ipex_inductor.reporting.decisions import GraphReport
from ipex_inductor.target.device import current

Node = torch.fx.Node
aten, prims = torch.ops.aten, torch.ops.prims

NAME = "max-pool"
FASTER = {"sm_90"}  # nobody measured it elsewhere
WHOLE = frozenset({"max_pool2d_with_indices_backward"})  # from torch 2.12 on it is decomposed
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MOST_WINDOWS = 3  # that a pixel is in, to a side: the kernel asks each
LANE = 8  # channels that a thread reads at once


def replace(graph: torch.fx.Graph, report: GraphReport) -> None:
    """Give every max pool that has a backward, and that they are for, to kernels of ours."""
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
        said = ["its backward by a kernel of ours"]
        said += ["the mask of the relu before it is as large as its result"] if masked else []
        said += ["with the batch norm and the relu before it one kernel"] if joined else []
        report.add("fired", NAME, "; ".join(said), line)


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
    """The pool that this is the backward of."""
    (made,) = node.args[-1].args[0].all_input_nodes
    return made


def _replace_backward(graph: torch.fx.Graph, node: Any) -> bool:
    """Whether the mask behind it is another one now."""
    grad, x, *_, indices = node.args
    offsets, window, image, stride, padding, _ = indices.args
    mask = _mask(node, x)
    pooled = mask and _pooled(_pool(node))
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
    *around: list[int],
) -> Tensor:
    """The gradient of the image, masked by where `pooled`, if that is given, is positive.

    A value that a pool takes is that of the image in this place, so a mask of the image's signs is
    one of the pool's, wherever a gradient goes; all else is zero.
    """
    if pooled is not None:
        grad = aten.threshold_backward(grad, pooled, 0)
    rows = torch.ops.ipex.max_pool_backward(grad, offsets, image, *around)
    return image_of(rows, len(grad), *image)


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


def _pooled(pool: Any) -> Any:
    """What the pool made, beside where from."""
    made = (u for u in pool.users if u.target is operator.getitem and u.args[1] == 0)
    return next(made, None)


def _join(graph: torch.fx.Graph, pool: Any) -> bool:
    """One op of the pool and of the batch norm and relu before it, if nobody else reads those."""
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
    each = mean, rstd, weight, bias
    plain = all(n is not None and n.meta["val"].dtype == torch.float32 for n in each)
    plain &= pool.meta["val"][0].shape[2:] == sides(value.shape[2:], window, stride, padding)
    last = value.is_contiguous(memory_format=torch.channels_last)
    if not (plain and last and value.dtype == normed.meta["val"].dtype):
        return False
    pool.args = (x, *each, window, stride, padding)
    inline(graph, pool, forward)
    graph.eliminate_dead_code()
    return True


def _result(graph: torch.fx.Graph, norm: Any, index: int) -> Any:
    """What a batch norm gives in that place."""
    for user in norm.users:
        if user.target is operator.getitem and user.args[1] == index:
            return user
    with graph.inserting_after(norm):
        made = graph.call_function(operator.getitem, (norm, index))
    made.meta["val"] = norm.meta["val"][index]
    return made


def forward(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """What the pool made, and its offsets, as torch's own op has them."""
    *_, window, stride, padding = rest
    size = sides(x.shape[2:], window, stride, padding)
    pooled, offsets = torch.ops.ipex.norm_relu_pool(x, *rest)
    return image_of(pooled, len(x), *size), image_of(offsets, len(x), *size)
