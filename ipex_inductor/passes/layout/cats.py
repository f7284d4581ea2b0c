"""Concatenate on a GPU so that each part is computed once, where parts have other readers too.

    cat([silu(a), silu(a) + b]) => ipex.cat([...]) where others read `silu(a)` as well

Before torch 2.13 Inductor compiles such a concatenation to one kernel, which computes all parts for
each element of the result and selects one: for six parts behind activations on an H200 that takes
three times as long as copying them. From 2.13 on Inductor itself does what is done here.
"""

import operator
from typing import Any

import torch
from torch._dynamo.utils import counters

import ipex_inductor.ops  # noqa: F401  registers ours
from ipex_inductor import compat
from ipex_inductor.passes.engine.source import user_line
from ipex_inductor.reporting.decisions import GraphReport

Node = torch.fx.Node
aten = torch.ops.aten

NAME = "shared-parts"


def rewrite(graph: torch.fx.Graph, report: GraphReport) -> None:
    """Replace concatenations on a GPU with a part that is also computed for other readers."""
    if not compat.computes_shared_parts_again():
        return
    for node in graph.find_nodes(op="call_function", target=aten.cat.default):
        parts, dim = _arguments(*node.args, **node.kwargs)
        if not node.meta["val"].is_cuda or not any(_is_shared(part, node) for part in parts):
            continue
        if reason := _why_not(parts):
            report.add("missed", NAME, reason, user_line(node))
            continue
        node.target, node.args = torch.ops.ipex.cat.default, (parts, dim)
        counters["ipex"][NAME] += 1
        report.add("fired", NAME, f"{len(parts)} parts", user_line(node))


def _arguments(tensors: Any, dim: int = 0) -> tuple[Any, int]:
    return tensors, dim


def _is_shared(part: Node, cat: Node) -> bool:
    """Return whether a part is also computed in loops of other readers, or fused for them alone."""
    readers = [user for user in part.users if user is not cat]
    return part.op == "call_function" and bool(readers) and any(map(_is_loop, [*readers, part]))


def _is_loop(node: Any) -> bool:
    """Return whether Inductor computes a node within the loop of its reader."""
    while node.target is operator.getitem or getattr(node.target, "is_view", False):
        node = node.args[0]
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def _why_not(parts: Any) -> str | None:
    values = [part.meta["val"] for part in parts]
    if len({value.dtype for value in values}) > 1:
        return "its parts are of several dtypes"
    if len({value.dim() for value in values}) > 1:  # `torch.cat` skips empty parts of another rank
        return "its parts are of several ranks"
    return None
