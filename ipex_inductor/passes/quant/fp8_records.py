"""Call each op that reads or writes a scaling state once a graph, not once a layer.

    read(state, [a]); read(state, [b])        => slices of read(state, [a, b])
    state' = record(state, [x], [a]); record(state', [y], [b]) => record(state, [x, y], [a, b])

It is done in joint graphs of training, where writes are functional: `auto_functionalized_v2`
returns the state as it is afterwards. Results are the same: a record writes rows of the history, a
read reads rows of scales, and no column is recorded twice by one op.
"""

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from ipex_inductor.passes.engine.whole_ops import EAGER_STRIDES, compute_value

aten, ipex = torch.ops.aten, torch.ops.ipex
RECORDS = (ipex.fp8_record.default, ipex.fp8_record_gradients.default)
MAXIMA, COLUMNS, BASES, BASE = "maxima", "columns", "_all_bases", "_state_base_index"


def merge(graph: Graph) -> None:
    """Merge reads and records of the same state in place."""
    records = [node for node in graph.nodes if is_record(node)]
    _merge_reads(graph, records)
    for record in records:
        _take_previous(graph, record)
    for record in records:
        if record.kwargs:  # not erased
            _sort(record)


def is_record(node: Node) -> bool:
    """Return whether a node is a functional call that records maxima in a whole state."""
    functional: Any = torch.ops.higher_order.auto_functionalized_v2
    if node.target is not functional or node.args[0] not in RECORDS:
        return False
    views = {name for name in node.kwargs if name.startswith("_state_")} - {BASE}
    return not views and len(node.kwargs.get(BASES, ())) == 1  # type: ignore[arg-type]


def _merge_reads(graph: Graph, records: list[Node]) -> None:
    """Read all scales of a state by its first read, before it is recorded in."""
    reads: dict[Node, list[Node]] = {}
    for node in graph.find_nodes(op="call_function", target=ipex.fp8_read_scales.default):
        reads.setdefault(_find_unrecorded(node.args[0]), []).append(node)
    for state, nodes in reads.items():
        if len(nodes) < 2:
            continue
        lists: list[Any] = [node.args[1] for node in nodes]
        columns = sorted({column for each in lists for column in each})
        with graph.inserting_before(nodes[0]):
            whole = graph.call_function(nodes[0].target, (state, columns))  # type: ignore[arg-type]
            whole.meta = {**nodes[0].meta}
            whole.meta.pop(EAGER_STRIDES, None)
            whole.meta["val"] = compute_value(whole)
        for node, part in zip(nodes, lists, strict=True):
            first = columns.index(part[0])
            if columns[first : first + len(part)] != list(part):
                continue
            with graph.inserting_before(node):
                own = graph.call_function(aten.slice.Tensor, (whole, 1, first, first + len(part)))
                own.meta = {**whole.meta}
                own.meta["val"] = compute_value(own)
            node.replace_all_uses_with(own)
            graph.erase_node(node)


def _find_unrecorded(state: Any) -> Node:
    """Return the state from which records made this one."""
    while state.target is operator.getitem and is_record(state.args[0]):
        state = state.args[0].kwargs[BASES][0]
    result: Node = state
    return result


def _take_previous(graph: Graph, record: Node) -> None:
    """Let a record do what the one before it does, if nothing reads the state between them."""
    state: Any = record.kwargs[BASES][0]  # type: ignore[index]
    if state.target is not operator.getitem or not is_record(state.args[0]):
        return
    previous: Any = state.args[0]
    rest = [
        {k: v for k, v in n.kwargs.items() if k not in (MAXIMA, COLUMNS, BASES)}
        for n in (previous, record)
    ]
    columns = [*previous.kwargs[COLUMNS], *record.kwargs[COLUMNS]]  # type: ignore[misc]
    same = previous.args == record.args and rest[0] == rest[1] and len({*columns}) == len(columns)
    alone = set(state.users) == {record} and set(previous.users) == {state}
    if not (same and alone):
        return
    record.kwargs = {
        **record.kwargs,
        MAXIMA: [*previous.kwargs[MAXIMA], *record.kwargs[MAXIMA]],  # type: ignore[misc]
        COLUMNS: columns,
        BASES: previous.kwargs[BASES],
    }
    record.meta.pop(EAGER_STRIDES, None)  # of the arguments before
    for node in (state, previous):
        graph.erase_node(node)
        node.kwargs = {}


def _sort(record: Node) -> None:
    """Order maxima by their columns: those of consecutive layers are views of the state."""
    columns: Any = record.kwargs[COLUMNS]
    maxima: Any = record.kwargs[MAXIMA]
    order = sorted(range(len(columns)), key=columns.__getitem__)
    record.kwargs = {
        **record.kwargs,
        MAXIMA: [maxima[i] for i in order],
        COLUMNS: [columns[i] for i in order],
    }
