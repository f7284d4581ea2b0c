"""Ops kept whole while rules run, and then decomposed exactly as Inductor would have.

Inductor's decompositions insert casts in low precision and change between versions, so a rule
that had to match them would be fragile.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from ipex_inductor import compat

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
            inline(graph, node, node.target, table, traced, restrides=False)


def inline(
    graph: torch.fx.Graph,
    node: torch.fx.Node,
    fn: Callable[..., Any],
    table: Table | None = None,
    traced_before: dict[Any, torch.fx.GraphModule] | None = None,
    origins: bool = False,
    restrides: bool = True,
) -> None:
    """Put the traced body of `fn` in the place of `node`; other nodes keep name and meta.

    Args:
        graph: The graph of `node`.
        node: The call that is replaced.
        fn: A function of the node's arguments.
        table: Decompositions for the trace; Inductor's by default.
        traced_before: Bodies of earlier calls with the same `table`.
        origins: Each node of the body is its own origin, by which Inductor names kernels, and not
            what `node` was.
        restrides: A result keeps the strides of `node`, on which the rest of the graph and the
            caller rely. Without it, strides are what `fn` gives: of Inductor's decompositions, and
            of GPU calls, which are offered for results that lie so.
    """
    inputs = list(dict.fromkeys(node.all_input_nodes))
    key = _key(fn, node, inputs)
    traced = None if traced_before is None or key is None else traced_before.get(key)
    if traced is None:
        known = select_decomp_table() if table is None else table
        traced = _traced(fn, node, inputs, known, restrides)
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
    return fn, str(facts), str(places), str(_strides(node.meta.get("val")))


def _strides(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_strides(each) for each in value]
    return value.stride() if isinstance(value, Tensor) else None


def lies_alike(value: Tensor, other: Tensor) -> bool:
    """Return whether both have equal strides wherever a size is larger than one.

    Of sizes that vary, as they are now: a tracer would take a comparison of symbols into the graph.
    """
    return all(
        (isinstance(size, int) and size == 1) or compat.hints(one) == compat.hints(two)
        for size, one, two in zip(value.shape, value.stride(), other.stride(), strict=True)
    )


def restrided(result: Any, like: Any) -> Any:
    """Return `result` with the dimensions in memory in the order of `like`, a copy if need be.

    Args:
        result: A tensor, or several.
        like: Tensors of the same shapes; whatever is no tensor leaves `result` as it is.
    """
    if isinstance(result, (tuple, list)) and isinstance(like, (tuple, list)):
        return [restrided(*pair) for pair in zip(result, like, strict=False)]
    tensors = isinstance(result, Tensor) and isinstance(like, Tensor)
    if not tensors or result.dim() != like.dim() or lies_alike(result, like):
        return result
    for op, args, kwargs in restriding(like):
        result = op(result, *args, **kwargs)
    return result


def restriding(like: Tensor) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """Return the calls, each on the result of the last, that copy a tensor in the order of `like`.

    The order of its dimensions in memory. Each call is an op, further arguments, and keywords.
    """
    aten = torch.ops.aten
    steps = [compat.hints(step) or 0 for step in like.stride()]
    order = sorted(range(len(steps)), key=lambda dim: -steps[dim])
    back = sorted(range(len(order)), key=order.__getitem__)
    copy: tuple[Any, ...] = (aten.clone.default, (), {"memory_format": torch.contiguous_format})
    return [(aten.permute.default, (order,), {}), copy, (aten.permute.default, (back,), {})]


def keep_strides(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """Let what reads `node` have the strides of its `val`, whatever its op gives.

    For a call that was put in the place of another and has that one's `val`.
    """
    promised = node.meta["val"]
    value = _evaluated(node)
    if lies_alike(value, promised):
        return
    node.meta["val"], readers = value, list(node.users)
    copy = copy_restrided(graph, node, promised)
    for reader in readers:
        reader.replace_input_with(node, copy)


def copy_restrided(graph: torch.fx.Graph, node: torch.fx.Node, like: Tensor) -> torch.fx.Node:
    """Return a copy of what `node` computes, in the order of dimensions that `like` has."""
    last = node
    for op, args, kwargs in restriding(like):
        with graph.inserting_after(last):
            last = graph.call_function(op, (last, *args), kwargs)
        last.meta = {**node.meta, "val": None}
        last.meta["val"] = _evaluated(last)
    return last


def _evaluated(node: torch.fx.Node) -> Any:
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    fake_mode = detect_fake_mode([n.meta["val"] for n in node.all_input_nodes])
    assert fake_mode is not None
    with fake_mode, enable_python_dispatcher(), torch.no_grad():
        return node.target(*args, **kwargs)  # type: ignore[operator]


def _placeholders(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def _traced(
    fn: Callable[..., Any],
    node: torch.fx.Node,
    inputs: list[torch.fx.Node],
    table: Table,
    restrides: bool,
) -> torch.fx.GraphModule:
    def call(*values: Any) -> Any:
        env = dict(zip(inputs, values, strict=True))
        args = map_arg(node.args, lambda n: env[n])
        kwargs = map_arg(node.kwargs, lambda n: env[n])
        result = fn(*args, **kwargs)
        return restrided(result, node.meta.get("val")) if restrides else result

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
