"""Compute attention of few queries over a cache on a CPU by our kernel, which reads live keys.

A static cache has room for more tokens than were written, and a mask hides the rest from torch's
kernel, which reads it all the same. Ours finds the first and the last key that a mask of -inf
leaves, for each text of the batch, and reads those between them. That holds for any such mask:
caches, padding on the left, sliding windows, chunks of a prompt.

Beams that read keys of other beams by a table have them gathered in the graph. The kernel reads
them where they are, so the gather is removed.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ipex_inductor.ops.attention.decode_attention import QUERIES, why_not_supported
from ipex_inductor.passes.attention.short_attention import TORCHS, replace, takes
from ipex_inductor.reporting.decisions import GraphReport
from ipex_inductor.target.device import architecture

Node = torch.fx.Node
aten = torch.ops.aten

NAME = "decode-attention"


class Gathered(NamedTuple):
    """Keys or values that a table of beams names, before they are gathered."""

    states: Node
    table: Node


def place_decoding(
    graph: torch.fx.Graph, report: GraphReport, why_not: Callable[[], str | None]
) -> None:
    """Replace masked attention of few queries by our kernel; for inference, it has no gradient.

    Args:
        graph: The graph, changed in place.
        report: Gets the decision.
        why_not: Returns why our kernel is not available, or None. It is called only where the
            kernel would be used.
    """
    attentions = [n for n in graph.find_nodes(op="call_function", target=TORCHS) if _is_few(n)]
    if not attentions or why_not() is not None:
        return
    tables = sum([_place(node) for node in attentions])
    beams = f", {tables} by a table of beams" if tables else ""
    report.add("choice", NAME, f"{len(attentions)} by this package's kernel{beams}")


def _place(node: Node) -> bool:
    """Replace `node` by our kernel; return whether it reads a table of beams."""
    q, k, v = node.args[:3]
    keys, values = find_gathered(k), find_gathered(v)
    table = None
    if keys and values and keys.table is values.table:
        k, v, table = keys.states, values.states, keys.table
    operands = q, k, v, node.kwargs["attn_mask"], table
    gathered = dict.fromkeys(n for n in node.args[1:3] if isinstance(n, Node))
    target = torch.ops.ipex.decode_attention.default
    replace(node, target, operands, node.kwargs.get("scale"))
    for unused in gathered if table is not None else ():
        _erase(unused)
    return table is not None


def _is_few(node: Node) -> bool:
    """Return whether our kernel supports `node`, and few enough queries share a mask."""
    mask: Any = node.kwargs.get("attn_mask")
    causal = (*node.args[4:5], node.kwargs.get("is_causal", False))[0]
    if mask is None or causal or not takes(node):
        return False
    queries = node.args[0].meta["val"]  # type: ignore[union-attr]
    _, _, rows, width = queries.shape
    return rows <= QUERIES and not why_not_supported(architecture(), queries.dtype, width)


def find_gathered(node: Any) -> Gathered | None:
    """Return what `node` is gathered from by a table, None if it is something else.

    `llm.beam_table.gather_rows` writes `states[table, :, arange(positions)].transpose(1, 2)`.
    """
    if node.target is not aten.permute.default or [*node.args[1]] != [0, 2, 1, 3]:
        return None
    index = node.args[0]
    if not isinstance(index, Node) or index.target is not aten.index.Tensor:
        return None
    states, indices = index.args
    if not isinstance(states, Node) or not isinstance(indices, list | tuple) or len(indices) != 3:
        return None
    table: Any = indices[0]
    whole, positions = indices[1:]
    batch, _, keys, _ = states.meta["val"].shape
    is_table = (
        whole is None
        and isinstance(table, Node)
        and table.meta["val"].dtype is torch.int64
        and tuple(table.meta["val"].shape) == (batch, keys)
        and _counts(positions, keys)
    )
    return Gathered(states, table) if is_table else None


def _counts(node: Any, count: int) -> bool:
    """Return whether `node` is 0, 1, 2, ... in `count` elements."""
    if not isinstance(node, Node) or node.target is not torch.ops.prims.iota.default:
        return False
    start, step = (node.kwargs.get(name) for name in ("start", "step"))
    return node.args[:1] == (count,) and (start, step) == (0, 1)


def _erase(node: Node) -> None:
    """Erase a gather that nothing reads, with its steps."""
    while (
        isinstance(node, Node)
        and not node.users
        and node.target
        in (
            aten.permute.default,
            aten.index.Tensor,
        )
    ):
        before: Any = node.args[0]
        node.graph.erase_node(node)
        node = before
