"""Compute attention over few keys on a CPU by a kernel of ours, where it was measured to be faster.

Torch's CPU kernel goes over keys in parts and converts the operands of its GEMMs. While a head's
scores fit the cache, whole rows and GEMMs on packed pairs take half the time or less.
"""

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ipex_inductor.reporting.decisions import GraphReport
from ipex_inductor.target.device import architecture

Node = torch.fx.Node
aten = torch.ops.aten

TORCHS = aten._scaled_dot_product_flash_attention_for_cpu.default
# The most queries and keys and the largest head width for which our kernel is faster, by CPU and
# dtype.
FASTER: Mapping[tuple[str, torch.dtype], tuple[float, int, int]] = {
    ("x86-64:avx512_bf16", torch.bfloat16): (math.inf, 1024, 256),
    ("x86-64:avx512_bf16", torch.float32): (math.inf, 1024, 256),
    ("x86-64:avx2", torch.float32): (math.inf, 1024, 128),
    ("x86-64:avx2", torch.bfloat16): (6, 1024, 128),
}
LANES = 16  # a head's width is a multiple of this


def shorten(graph: torch.fx.Graph, report: GraphReport, why_not: Callable[[], str | None]) -> None:
    """Replace attention over few keys by our kernel; for inference only, as it has no gradient.

    Args:
        why_not: Returns why our kernel is not available, or None. It is called only where the
            kernel would be faster.
    """
    attentions = [n for n in graph.find_nodes(op="call_function", target=TORCHS) if _is_faster(n)]
    if not attentions or why_not() is not None:
        return
    for node in attentions:
        q, k, v, *rest = node.args
        causal = rest[1] if len(rest) > 1 else node.kwargs.get("is_causal", False)
        operands = q, k, v, node.kwargs.get("attn_mask"), causal
        replace(node, torch.ops.ipex.short_attention.default, operands, node.kwargs.get("scale"))
    report.add("choice", "attention over few keys", f"{len(attentions)} by this package's kernel")


def replace(node: Node, target: Any, operands: tuple[Any, ...], scale: Any) -> None:
    """Replace torch's attention `node` by a call of ours on `operands` and the scale."""
    (result,) = node.users
    q: Any = node.args[0]
    scale = q.meta["val"].shape[3] ** -0.5 if scale is None else scale
    with node.graph.inserting_before(node):
        call = node.graph.call_function(target, (*operands, scale))
    call.meta = dict(result.meta)
    result.replace_all_uses_with(call)
    node.graph.erase_node(result)
    node.graph.erase_node(node)


def takes(node: Node) -> bool:
    """Return whether our kernels read the operands of `node`, and only its result is used."""
    q, k, v, *rest = node.args
    mask = node.kwargs.get("attn_mask")
    values: list[torch.Tensor] = [t.meta["val"] for t in (q, k, v, mask) if isinstance(t, Node)]
    sizes = [size for value in values for size in value.shape]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return False
    first, second = values[:2]
    batch, heads, _, width = second.shape
    return (
        is_read_alone(node)
        and all(value.dtype == first.dtype and value.device.type == "cpu" for value in values)
        and tuple(first.shape) == (batch, heads, first.shape[2], width)
        and values[2].shape == second.shape
        and first.stride(3) == 1  # the result has the query's strides, so its rows are contiguous
        and not (rest[:1] or [node.kwargs.get("dropout_p", 0.0)])[0]
        and is_number(node.kwargs.get("scale"))
    )


def _is_faster(node: Node) -> bool:
    """Return whether our kernel supports `node` and was measured to be faster on its sizes."""
    first, second = (t.meta["val"] for t in node.args[:2])  # type: ignore[union-attr]
    bounds = FASTER.get((architecture(), first.dtype))
    if bounds is None or not takes(node):
        return False
    queries, most, widest = bounds
    _, _, keys, width = second.shape
    return bool(
        first.shape[2] <= queries and keys <= most and width % LANES == 0 and width <= widest
    )


def is_read_alone(node: Node) -> bool:
    """Return whether only the first result of torch's attention is used."""
    return [(user.target, user.args[1]) for user in node.users] == [(operator.getitem, 0)]


def is_number(scale: Any) -> bool:
    """Return whether a scale is a finite number, or None."""
    return scale is None or (isinstance(scale, int | float) and math.isfinite(scale))
