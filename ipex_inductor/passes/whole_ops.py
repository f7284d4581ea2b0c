"""Ops kept whole while rules run, and then decomposed exactly as Inductor would have.

Inductor's decompositions insert casts in low precision and change between versions, so a rule
that had to match them would be fragile.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

Table = dict[Any, Callable[..., Any]]

# Ops for which whole-then-decomposed is tested to give plain Inductor's own graph.
WHOLE = (
    "_native_batch_norm_legit",
    "_native_batch_norm_legit_functional",
    "_native_batch_norm_legit_no_training",
    "_softmax",
    "clamp",
    "elu",
    "gelu",
    "hardsigmoid",
    "hardswish",
    "hardtanh",
    "leaky_relu",
    "max_pool2d_with_indices_backward",
    "mish",
    "native_layer_norm",
    "silu",
)

# What describes the decomposed node itself, not where it came from.
_OWN_META = ("val", "tensor_meta")


@functools.cache
def overloads(names: frozenset[str]) -> frozenset[Any]:
    """The overloads of the aten ops called `names`."""
    packets = [getattr(torch.ops.aten, name) for name in names]
    return frozenset(getattr(packet, o) for packet in packets for o in packet.overloads())


def reduced_table(names: frozenset[str]) -> Table:
    """Inductor's current decomposition table without the ops called `names`."""
    whole = overloads(names)
    return {op: fn for op, fn in select_decomp_table().items() if op not in whole}


def decompose(graph: torch.fx.Graph, names: frozenset[str]) -> None:
    """Replace the ops called `names` by Inductor's decompositions of them, in place."""
    table = select_decomp_table()
    whole = overloads(names)
    traced: dict[Any, torch.fx.GraphModule] = {}  # a model repeats its layers
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in whole and node.target in table:
            inline(graph, node, node.target, table, traced)


def inline(
    graph: torch.fx.Graph,
    node: torch.fx.Node,
    fn: Callable[..., Any],
    table: Table | None = None,
    traced_before: dict[Any, torch.fx.GraphModule] | None = None,
    origins: bool = False,
) -> None:
    """Put the traced body of `fn` in the place of `node`; other nodes keep name and meta.

    `traced_before` remembers bodies between calls with the same `table`. With `origins` each node
    of the body is its own origin, by which Inductor names kernels, and not what `node` was.
    """
    inputs = list(dict.fromkeys(node.all_input_nodes))
    key = _key(fn, node, inputs)
    traced = None if traced_before is None or key is None else traced_before.get(key)
    if traced is None:
        traced = _traced(fn, node, inputs, select_decomp_table() if table is None else table)
        if traced_before is not None and key is not None:
            traced_before[key] = traced
    copies = dict(zip(_placeholders(traced.graph), inputs, strict=True))
    made = []
    with graph.inserting_before(node):
        for inner in traced.graph.nodes:
            if inner.op in ("placeholder", "output"):
                continue
            if inner.op != "call_function":
                raise AssertionError(f"decomposition of {node.target} holds {inner.op}")
            copies[inner] = graph.node_copy(inner, lambda n: copies[n])
            own = {key: inner.meta[key] for key in _OWN_META if key in inner.meta}
            copies[inner].meta = {**node.meta, **own}
            if origins:
                copies[inner].meta["original_aten"] = inner.target
            made.append(copies[inner])
    (result,) = traced.graph.output_node().args
    _replace(graph, node, map_arg(result, lambda n: copies[n]))
    for unused in reversed(made):  # results nobody asked for, such as the saved mean
        if not unused.users:
            graph.erase_node(unused)


def _replace(graph: torch.fx.Graph, node: torch.fx.Node, result: Any) -> None:
    if isinstance(result, torch.fx.Node):
        node.replace_all_uses_with(result)
    else:
        for user in list(node.users):  # getitem(node, index)
            user.replace_all_uses_with(result[user.args[1]])
            graph.erase_node(user)
    graph.erase_node(node)


def _key(fn: Any, node: torch.fx.Node, inputs: list[torch.fx.Node]) -> Any:
    """What the body of `fn` depends on; None where sizes are symbols."""
    values = [n.meta["val"] for n in inputs]
    if not all(isinstance(value, torch.Tensor) for value in values):
        return None
    facts = [(v.dtype, v.device, *v.shape, -1, *v.stride()) for v in values]
    if not all(isinstance(size, int) for fact in facts for size in fact[2:]):
        return None
    numbers = {n: i for i, n in enumerate(inputs)}
    places = map_arg((node.args, node.kwargs), lambda n: f"input {numbers[n]}")
    return fn, str(facts), str(places)


def _placeholders(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def _traced(
    fn: Callable[..., Any], node: torch.fx.Node, inputs: list[torch.fx.Node], table: Table
) -> torch.fx.GraphModule:
    def call(*values: Any) -> Any:
        env = dict(zip(inputs, values, strict=True))
        args = map_arg(node.args, lambda n: env[n])
        kwargs = map_arg(node.kwargs, lambda n: env[n])
        return fn(*args, **kwargs)

    values = [n.meta["val"] for n in inputs]
    fake_mode = detect_fake_mode(values)
    assert fake_mode is not None
    with fake_mode, enable_python_dispatcher():
        # A tracer tells inputs apart by identity, and two nodes may share what stands for them.
        for number, value in enumerate(values):
            if isinstance(value, torch.Tensor) and any(value is v for v in values[:number]):
                values[number] = value.detach()
        gm = make_fx(call, table, tracing_mode="real")(*values)
    gm.graph.eliminate_dead_code()
    return gm
