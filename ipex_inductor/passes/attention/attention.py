"""Rewrite attention written out by hand as torch's scaled_dot_product_attention.

Scales, masks and casts come in any number and order, so they are read from the graph one by one
(`scores`); a rule would need a pattern for each way to write it. Inductor has some thirty such
patterns, and attention that this pass rejects may still match one of them.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch._guards import detect_fake_mode
from torch.nn.attention import SDPBackend, sdpa_kernel

from ipex_inductor.passes.attention.fused_kernels import Kernels, lies_apart, side_by_side
from ipex_inductor.passes.attention.scores import (
    Product,
    Refused,
    Scores,
    Step,
    attention_of,
    dtype,
    mask_of,
    on_cpu,
    same,
    scores_of,
    shape,
    value,
    without_widening,
)
from ipex_inductor.passes.engine.source import user_line
from ipex_inductor.passes.engine.whole_ops import inline
from ipex_inductor.reporting.decisions import GraphReport
from ipex_inductor.target.device import architecture, current

Node = torch.fx.Node
aten = torch.ops.aten

NAME = "softmax(q@k)@v"
WHOLE = frozenset({"_softmax"})

# Sizes of the scores [batch, heads, queries, keys] for which two oneDNN GEMMs were measured to be
# faster than torch's kernel, by CPU and dtype. (In bf16 that kernel's GEMMs need AMX.)
FEW: dict[tuple[str, torch.dtype], Callable[..., bool]] = {
    ("x86-64:avx512_bf16", torch.bfloat16): lambda b, h, q, k: k <= 1024,
    ("x86-64:avx512_bf16", torch.float32): lambda b, h, q, k: b * h * q * k < 2**21,
}
# The most keys and the largest width for which cuDNN's kernel, torch's first choice, is slower:
# 1.7 to 3.6 times in windows of 49 and 64 with a bias, in bf16 on an H200
# (benchmarks/ops/attention.py).
WINDOWS = {"sm_90": (64, 32)}
NOTE = (
    "with so few scores Inductor's own is faster on this CPU "
    "(benchmarks/studies/left_to_inductor.py)"
)


def fuse_attention(graph: torch.fx.Graph, report: GraphReport) -> None:
    """Rewrite every product of a softmax of scores with a value; report the outcome."""
    masks: dict[Any, Node] = {}  # layers that add the same masks share the sum
    for bmm in graph.find_nodes(op="call_function", target=aten.bmm.default):
        match = attention_of(bmm)
        if match is None:
            continue
        product, where = match[0], user_line(match[0].node)
        try:
            kind, reason = _fuse(graph, product, without_widening(scores_of(*match)), masks)
        except Refused as refused:
            kind, reason = "missed", str(refused)
        report.add(kind, NAME, reason, where)
        if kind == "fired":
            counters["ipex"][NAME] += 1
    graph.eliminate_dead_code()


def _fuse(
    graph: torch.fx.Graph, product: Product, scores: Scores, masks: dict[Any, Node]
) -> tuple[str, str]:
    _check(product, scores)
    if on_cpu(scores.q) and _are_few(scores):
        return "left", NOTE
    _rewrite(graph, product, scores, masks)
    return "fired", ""


def _are_few(scores: Scores) -> bool:
    """Return whether two GEMMs are faster than torch's kernel for scores of these sizes.

    For a size that varies, its present value counts.
    """
    few = FEW.get((architecture(), dtype(scores.q)))
    sizes = (*shape(scores.q)[:3], shape(scores.k)[-1])
    hints = [n if isinstance(n, int) else n.node.hint for n in sizes]
    return few is not None and None not in hints and few(*hints)


def _check(product: Product, scores: Scores) -> None:
    """Raise `Refused` unless torch has a fused kernel for this attention."""
    q, k, v = map(value, (scores.q, scores.k, product.b))
    if not q.dtype == k.dtype == v.dtype == dtype(product.node):
        raise Refused("query, key, value and result differ in dtype")
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise Refused(f"no fused attention in {q.dtype}")
    if not q.dim() == k.dim() == v.dim() == 4:
        raise Refused("query, key and value are not [batch, heads, tokens, width]")
    if not same(k.shape[:2], q.shape[:2]) or not same(v.shape[:2], q.shape[:2]):
        raise Refused("query, key and value differ in batch or heads")
    mode, kernels = detect_fake_mode([q]), Kernels()  # type: ignore[no-untyped-call]
    assert mode is not None
    try:
        with mode, torch.no_grad():
            mask = _mask(scores.steps, *map(value, scores.tensors))
            if mask is not None and mask.dtype != q.dtype and not on_cpu(scores.q):
                raise Refused(f"the mask is in {mask.dtype}, and kernels read it in {q.dtype}")
            with kernels:
                _attend(q, k, v, mask)
    except RuntimeError as error:
        raise Refused(f"torch's attention rejects these: {error}") from error
    if not kernels.fused:
        raise Refused("torch has no fused kernel for these shapes and strides")


def _mask(steps: tuple[Step, ...], *tensors: Tensor) -> Tensor | None:
    """Return the sum of what is added to the scores, in a layout that torch's kernels read."""
    mask = mask_of(steps, *tensors)
    return side_by_side(mask) if mask is not None and lies_apart(mask) else mask


@contextlib.contextmanager
def _quickest(q: Tensor, keys: Any) -> Iterator[None]:
    """Restrict torch to its memory-efficient kernel where that was measured to be the fastest."""
    most = WINDOWS.get(current(q.device).arch) if q.device.type == "cuda" else None
    sizes = (keys, q.shape[-1])
    small = most is not None and all(map(_at_most, sizes, most))
    cuda: Any = torch.backends.cuda
    if small and cuda.mem_efficient_sdp_enabled() and cuda.math_sdp_enabled():
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            yield
    else:
        yield


def _at_most(size: Any, most: int) -> bool:
    return isinstance(size, int) and size <= most


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    scale: float = 1.0,
    strided: bool = True,
) -> Tensor:
    """Return the attention of a transposed key.

    Args:
        q: The query [batch, heads, queries, width].
        k: The transposed key [batch, heads, width, keys].
        v: The value [batch, heads, keys, width].
        mask: What is added to the scores; None for nothing.
        scale: The factor of the scores.
        strided: Whether the result may keep the kernel's strides; it is made contiguous otherwise.
    """
    with _quickest(q, k.shape[-1]):
        result = F.scaled_dot_product_attention(q, k.transpose(-1, -2), v, mask, scale=scale)
    return result if strided else result.contiguous()


def _is_copied(user: Node) -> bool:
    """Return whether `user` only permutes the result for a contiguous copy.

    Nothing sees the kernel's strides then.
    """
    return user.target is aten.permute.default and all(
        copy.target is aten.clone.default
        and copy.kwargs.get("memory_format") is torch.contiguous_format
        for copy in user.users
    )


def _rewrite(
    graph: torch.fx.Graph, product: Product, scores: Scores, masks: dict[Any, Node]
) -> None:
    meta = {key: fact for key, fact in product.node.meta.items() if key != "val"}
    with graph.inserting_before(product.node):
        mask: Any = masks.get(scores.steps)
        if mask is None and scores.tensors:
            mask = graph.call_function(_mask, scores.tensors)
            mask.meta = meta
        call = graph.call_function(_attend, (scores.q, scores.k, product.b, mask))
        call.meta = meta
    if mask is not None and scores.steps not in masks:
        inline(graph, mask, functools.partial(_mask, scores.steps))
        masks[scores.steps] = call.args[3]  # type: ignore[assignment]
    strided = all(map(_is_copied, product.node.users))
    product.node.replace_all_uses_with(call)
    with torch.no_grad():
        inline(graph, call, functools.partial(_attend, scale=scores.scale, strided=strided))
