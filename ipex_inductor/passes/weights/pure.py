"""Find graphs and nodes whose only effects are their results."""

import math
import operator
from collections.abc import Collection

import torch

from ipex_inductor import compat
from ipex_inductor.passes.weights.program import KNOWN

Node = torch.fx.Node

# Every rank must take part each time, and a gathered weight is no longer local to its shard.
COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")
# Ops of ATen that write their running statistics, though the schemas do not say so.
WRITERS = frozenset(
    f"aten::{name}"
    for name in (
        *("batch_norm", "native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"),
        *("_batch_norm_impl_index", "instance_norm", "batch_norm_update_stats"),
        *("batch_norm_gather_stats", "batch_norm_gather_stats_with_counts"),
    )
)
HELD = 1 << 26  # bytes of inputs that may be held while a graph runs, for it to run again


def is_pure(node: Node) -> bool:
    """Return whether a call has no effect but its result, which its inputs determine."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    schema = node.target._schema
    random = torch.Tag.nondeterministic_seeded in node.target.tags
    alone = node.target.namespace not in COLLECTIVES
    writes = schema.is_mutable or schema.name in WRITERS
    return alone and not writes and not random


def is_repeatable(graph: torch.fx.Graph, weights: Collection[Node]) -> bool:
    """Return whether a graph may run again on equal inputs, and gives equal results then.

    It writes no input, draws no random number and takes part in no collective. It asserts nothing,
    which on a GPU would end the process, and has no user's operator, whose schema may be wrong.
    Inputs must be held meanwhile, so large ones rule it out.

    Args:
        graph: The graph.
        weights: Inputs that are held anyway.
    """
    unheld = (n for n in graph.find_nodes(op="placeholder") if n not in weights)
    if sum(map(_bytes, unheld)) > HELD:
        return False
    calls = (n for n in graph.nodes if n.op not in ("placeholder", "get_attr", "output"))
    return all(_is_arithmetic(n) or (is_pure(n) and _is_known(n)) for n in calls)


def _is_arithmetic(node: Node) -> bool:
    """Return whether a node computes a size: a Python number, by a function of Python or torch."""
    module = getattr(node.target, "__module__", None)
    named = module in ("_operator", "math", "torch") and not isinstance(
        node.target, torch._ops.OpOverload
    )
    return named and not isinstance(node.meta.get("val"), torch.Tensor)


def _is_known(node: Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.target is operator.getitem
    schema = node.target._schema
    return schema.name.startswith(KNOWN) and "_assert_" not in schema.name and bool(schema.returns)


def _bytes(node: Node) -> int:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return 0
    sizes = compat.hints(value)
    return HELD + 1 if None in sizes else math.prod(sizes) * value.element_size()
