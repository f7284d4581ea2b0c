"""Compute attention of few queries over a cache on an NVIDIA GPU by our kernel.

The kernel divides the keys of a head among programs, so a batch of one fills the device, and reads
only keys between the first and the last that the mask shows. It reads a mask of bools as it is:
torch's kernels need one of 0 and -inf, which each layer would write.
"""

import math
from typing import Any

import torch

from ipex_inductor.ops.attention.decode_attention import QUERIES, why_not_supported
from ipex_inductor.ops.common.defining import Arguments, name_arguments
from ipex_inductor.passes.attention.decode_attention import NAME
from ipex_inductor.passes.attention.short_attention import is_number, is_read_alone, replace
from ipex_inductor.reporting.decisions import GraphReport
from ipex_inductor.target.device import nvidia

Node = torch.fx.Node
aten = torch.ops.aten

TORCHS = (
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
)
HIDDEN_BY_CUDNN = -65504.0  # what torch writes for keys that a mask of bools hides
MOST_STEP = 2**31  # elements from the first to the last key of a head, exclusively


def place_decoding(graph: torch.fx.Graph, report: GraphReport) -> None:
    """Replace masked attention of few queries by our kernel; for inference, it has no gradient.

    Args:
        graph: The graph, changed in place.
        report: Gets the decision.
    """
    calls = [n for target in TORCHS for n in graph.find_nodes(op="call_function", target=target)]
    reasons: dict[str, int] = {}
    count = 0
    for node in calls:
        call = _name(node)
        if call.attn_bias is None or not _is_few(call):
            continue
        if reason := _why_not(node, call):
            reasons[reason] = reasons.get(reason, 0) + 1
            continue
        operands = call.query, call.key, call.value, find_condition(call.attn_bias, node), None
        replace(node, torch.ops.ipex.decode_attention.default, operands, call.scale)
        count += 1
    if count:
        report.add("choice", NAME, f"{count} by this package's kernel")
    for reason, times in reasons.items():
        report.add("missed", NAME, f"{times} left to torch: {reason}")


def _name(node: Node) -> Arguments:
    overload: Any = node.target
    return name_arguments(overload, node.args, node.kwargs)


def _is_few(call: Arguments) -> bool:
    """Return whether there are few queries a head, of a size that does not vary."""
    rows = call.query.meta["val"].shape[2]
    return isinstance(rows, int) and rows <= QUERIES


def _why_not(node: Node, call: Arguments) -> str:
    """Return why our kernel does not compute a call, "" if it does."""
    q, k, v, mask = (n.meta["val"] for n in (call.query, call.key, call.value, call.attn_bias))
    target = nvidia(q.device)
    if target is None:
        return "the kernel is for NVIDIA GPUs"
    if not all(isinstance(size, int) and size > 0 for t in (q, k, v, mask) for size in t.shape):
        return "a size varies, or is zero"
    if not is_read_alone(node) or call.is_causal or call.dropout_p or not is_number(call.scale):
        return "it has other results, is_causal, dropout, or a scale that is a tensor"
    if k.shape != v.shape or (*q.shape[:2], q.shape[3]) != (*k.shape[:2], k.shape[3]):
        return "queries, keys and values differ in heads or width"
    if {t.dtype for t in (k, v, mask)} != {q.dtype}:
        return "operands differ in dtype"
    if any(t.stride(3) != 1 for t in (q, k, v)):
        return "the elements of a row lie apart"
    if any(t.shape[2] * t.stride(2) >= MOST_STEP for t in (k, v)):
        return "keys lie too far apart"
    return why_not_supported(target.arch, q.dtype, q.shape[3])


def find_condition(mask: Node, attention: Node) -> Node:
    """Return the bools that `mask` has as 0 and -inf, or `mask` itself, without expansions.

    For cuDNN torch writes a large number for -inf. Only where torch wrote it, it means -inf: there
    the mask is of the call of torch's function that became `attention`.
    """
    mask = _skip_expansions(mask)
    if mask.target is not aten.where.self:
        return mask
    args: tuple[Any, ...] = mask.args
    condition, shown, hidden = args
    is_hidden = _is_filled(hidden, -math.inf) or (
        _is_filled(hidden, HIDDEN_BY_CUDNN) and _function(mask) == _function(attention) != ""
    )
    is_bool = condition.meta["val"].dtype is torch.bool
    is_condition = is_bool and _is_filled(shown, 0.0) and is_hidden
    return _skip_expansions(condition) if is_condition else mask


def _function(node: Node) -> str:
    """Return the name of the function in Dynamo's graph that a node was traced from."""
    stack = node.meta.get("source_fn_stack") or [("", "")]
    function = stack[-1][1]
    return getattr(function, "__name__", str(function))


def _skip_expansions(node: Any) -> Any:
    while node.target is aten.expand.default and _rank(node.args[0]) == _rank(node):
        node = node.args[0]
    return node


def _rank(node: Node) -> int:
    return int(node.meta["val"].dim())


def _is_filled(node: Any, value: float) -> bool:
    """Return whether `node` is a tensor that holds one value everywhere."""
    if not isinstance(node, Node):
        return bool(node == value)
    if node.target is aten.full.default:
        return bool(node.args[1] == value)
    return node.target is aten.scalar_tensor.default and bool(node.args[0] == value)
