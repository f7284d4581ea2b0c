"""Keep ops whole while rules run, and then decompose them exactly as Inductor would have.

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

# Meta entries that describe the decomposed node itself, not its origin.
_OWN_META = ("val", "tensor_meta")
EAGER_STRIDES = "eager_input_vals"  # by which Inductor would stride the arguments of another op


@functools.cache
def overloads(names: frozenset[str]) -> frozenset[Any]:
    """Return the overloads of the aten ops called `names`."""
    packets = [getattr(torch.ops.aten, name) for name in names]
    return frozenset(getattr(packet, o) for packet in packets for o in packet.overloads())


def reduced_table(names: frozenset[str]) -> Table:
    """Return Inductor's current decomposition table without the ops called `names`."""
    whole = overloads(names)
    return {op: fn for op, fn in compat.decomposition_table().items() if op not in whole}


def decompose(graph: torch.fx.Graph, names: frozenset[str]) -> None:
    """Replace the ops called `names` by Inductor's decompositions of them, in place."""
    table = compat.decomposition_table()
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
    """Replace `node` by the traced body of `fn`; other nodes keep name and meta.

    Args:
        graph: The graph of `node`.
        node: The call that is replaced.
        fn: A function of the node's arguments.
        table: Decompositions for the trace; Inductor's by default.
        traced_before: Bodies of earlier calls with this `table`.
        origins: Each node of the body is its own origin, by which Inductor names kernels; otherwise
            `node` is.
        restrides: A result keeps the strides of `node`, on which the rest of the graph and the
            caller rely. Without it, strides are those that `fn` gives: of Inductor's
            decompositions, and of GPU calls, which are candidates for results of that layout.
    """
    inputs = list(dict.fromkeys(node.all_input_nodes))
    key = _key(fn, node, inputs)
    traced = None if traced_before is None or key is None else traced_before.get(key)
    if traced is None:
        decompositions = compat.decomposition_table() if table is None else table
        traced = _trace(fn, node, inputs, decompositions, restrides)
        if traced_before is not None and key is not None:
            traced_before[key] = traced
    copies = dict(zip(_placeholders(traced.graph), inputs, strict=True))
    new_nodes = []
    with graph.inserting_before(node):
        for inner in traced.graph.nodes:
            if inner.op in ("placeholder", "output"):
                continue
            if inner.op != "call_function":
                raise AssertionError(f"decomposition of {node.target} holds {inner.op}")
            copies[inner] = graph.node_copy(inner, lambda n: copies[n])
            own_meta = {key: inner.meta[key] for key in _OWN_META if key in inner.meta}
            copies[inner].meta = {**node.meta, **own_meta}
            copies[inner].meta.pop(EAGER_STRIDES, None)
            if origins:
                copies[inner].meta["original_aten"] = inner.target
            new_nodes.append(copies[inner])
    (result,) = traced.graph.output_node().args
    _replace(graph, node, map_arg(result, lambda n: copies[n]))
    for unused in reversed(new_nodes):  # unread results, such as the saved mean
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
    """Return all that the body of `fn` depends on; None where sizes are symbols."""
    values = [n.meta["val"] for n in inputs]
    if not all(isinstance(value, torch.Tensor) for value in values):
        return None
    facts = [(v.dtype, v.device, *v.shape, -1, *v.stride()) for v in values]
    if not all(isinstance(size, int) for fact in facts for size in fact[2:]):
        return None
    numbers = {n: i for i, n in enumerate(inputs)}
    arguments = map_arg((node.args, node.kwargs), lambda n: f"input {numbers[n]}")
    return fn, str(facts), str(arguments), str(_strides(node.meta.get("val")))


def _strides(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_strides(item) for item in value]
    return value.stride() if isinstance(value, Tensor) else None


def lies_alike(value: Tensor, other: Tensor) -> bool:
    """Return whether both have equal strides wherever a size is larger than one.

    Sizes that vary count with their present value: a tracer would add a comparison of symbols to
    the graph.
    """
    return all(
        (isinstance(size, int) and size == 1) or compat.hints(step) == compat.hints(other_step)
        for size, step, other_step in zip(value.shape, value.stride(), other.stride(), strict=True)
    )


def match_strides(result: Any, like: Any) -> Any:
    """Return `result` with its dimensions ordered in memory as in `like`, copied if needed.

    Args:
        result: A tensor, or several.
        like: Tensors of equal shapes; where it holds no tensor, `result` is returned unchanged.
    """
    if isinstance(result, (tuple, list)) and isinstance(like, (tuple, list)):
        return [match_strides(*pair) for pair in zip(result, like, strict=False)]
    tensors = isinstance(result, Tensor) and isinstance(like, Tensor)
    if not tensors or result.dim() != like.dim() or lies_alike(result, like):
        return result
    for op, args, kwargs in list_restriding_calls(like):
        result = op(result, *args, **kwargs)
    return result


def list_restriding_calls(like: Tensor) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """Return the calls that copy a tensor so that its dimensions are ordered as in `like`.

    Each call is an op, further arguments, and keywords; it takes the result of the one before.
    """
    aten = torch.ops.aten
    steps = [compat.hints(step) or 0 for step in like.stride()]
    order = sorted(range(len(steps)), key=lambda dim: -steps[dim])
    back = sorted(range(len(order)), key=order.__getitem__)
    copy: tuple[Any, ...] = (aten.clone.default, (), {"memory_format": torch.contiguous_format})
    return [(aten.permute.default, (order,), {}), copy, (aten.permute.default, (back,), {})]


def keep_strides(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """Give the readers of `node` the strides of its `val`, whatever its op returns.

    It is for a call that replaced another one and has the `val` of that one.
    """
    promised = node.meta["val"]
    value = compute_value(node)
    if lies_alike(value, promised):
        return
    node.meta["val"], readers = value, list(node.users)
    copy = copy_restrided(graph, node, promised)
    for reader in readers:
        reader.replace_input_with(node, copy)


def copy_restrided(graph: torch.fx.Graph, node: torch.fx.Node, like: Tensor) -> torch.fx.Node:
    """Return a copy of `node` whose dimensions are ordered in memory as in `like`."""
    last = node
    for op, args, kwargs in list_restriding_calls(like):
        with graph.inserting_after(last):
            last = graph.call_function(op, (last, *args), kwargs)
        last.meta = {**node.meta, "val": None}
        last.meta["val"] = compute_value(last)
    return last


def compute_value(node: torch.fx.Node) -> Any:
    """Return the fake value of a call on the fake values of its arguments."""
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    fake_mode = detect_fake_mode([n.meta["val"] for n in node.all_input_nodes])
    assert fake_mode is not None
    with fake_mode, enable_python_dispatcher(), torch.no_grad():
        return node.target(*args, **kwargs)  # type: ignore[operator]


def _placeholders(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def _trace(
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
        return match_strides(result, node.meta.get("val")) if restrides else result

    values = [n.meta["val"] for n in inputs]
    fake_mode = detect_fake_mode(values)
    assert fake_mode is not None
    with fake_mode, enable_python_dispatcher():
        # A tracer distinguishes inputs by identity, and two nodes may share a fake value.
        for number, value in enumerate(values):
            if isinstance(value, torch.Tensor) and any(value is v for v in values[:number]):
                values[number] = value.detach()
        gm = make_fx(call, table, tracing_mode="real")(*values)
    gm.graph.eliminate_dead_code()
    return gm
