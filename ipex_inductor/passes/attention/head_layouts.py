"""Let attention on a GPU read heads where they are, instead of in copies.

    attention(clone(transpose(q)), clone(transpose(k)), ...) => attention(transpose(q), ...)

Models call `contiguous()` on heads that they took from a linear layer, for kernels of long ago.
Torch's kernels read any strides, and write their result in the order of the query, in which the
next layer then finds the heads of a token side by side.
"""

from typing import Any

import torch
from torch._dynamo.utils import counters

from ipex_inductor.passes.engine.source import user_line
from ipex_inductor.passes.engine.whole_ops import compute_value
from ipex_inductor.reporting.decisions import GraphReport

Node = torch.fx.Node
aten = torch.ops.aten

NAME = "attention-copies"
KERNELS = (
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
)
ALIGNED = 16  # bytes, at which kernels read a head
SWAPS: dict[Any, tuple[Any, ...]] = {
    aten.transpose.int: ([1, 2], [2, 1]),
    aten.permute.default: ([[0, 2, 1, 3]],),
}


def read_in_place(graph: torch.fx.Graph, report: GraphReport) -> None:
    """Remove copies of queries, keys and values that attention need not make.

    Args:
        graph: A graph of inference, changed in place.
        report: Gets the decisions.
    """
    for op in KERNELS:
        for node in graph.find_nodes(op="call_function", target=op):
            copies = {arg for arg in node.args[:3] if _is_needless(arg)}
            if not _is_result_turned(node):
                copies.discard(node.args[0])
            if not copies:
                continue
            for copy in copies:
                node.replace_input_with(copy, copy.args[0])
            _know_again(node)
            counters["ipex"][NAME] += 1
            report.add("fired", NAME, f"copies read no more: {len(copies)}", user_line(node))
    graph.eliminate_dead_code()


def _is_needless(node: Any) -> bool:
    """Return whether a node copies heads that a kernel could read where they are."""
    if not isinstance(node, Node) or node.target is not aten.clone.default:
        return False
    source: Any = node.args[0]
    value = source.meta["val"]
    *strides, last = value.stride()
    distances = (value.storage_offset(), *strides)
    if value.dim() != 4 or not all(isinstance(step, int) for step in distances):
        return False
    is_aligned = all(step * value.element_size() % ALIGNED == 0 for step in distances)
    return all(strides) and last == 1 and is_aligned


def _is_result_turned(node: Node) -> bool:
    """Return whether the heads of a result are moved beside their tokens, in a copy.

    Then no reader relies on the strides of the result itself.
    """
    results = [user for user in node.users if user.args[1] == 0]
    return all(
        _is_swap(turned) and all(_is_contiguous_copy(user) for user in turned.users)
        for result in results
        for turned in result.users
    )


def _is_swap(node: Node) -> bool:
    return [*node.args[1:]] in SWAPS.get(node.target, ())


def _is_contiguous_copy(node: Node) -> bool:
    return (
        node.target is aten.clone.default
        and node.kwargs.get("memory_format") is torch.contiguous_format
    )


def _know_again(node: Node) -> None:
    """Recompute the fake values of attention, and of its result and that result turned."""
    changed = [node]
    for result in node.users:
        changed += [result, *(turned for turned in result.users if _is_swap(turned))]
    for each in changed:
        each.meta["val"] = compute_value(each)
