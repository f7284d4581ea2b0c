"""Replace several ops by one GPU kernel, where that was chosen.

Otherwise the graph stays as it is, and a call is chosen for each op by itself.
"""

from collections.abc import Callable, Container
from typing import Any

import torch
from torch import Tensor
from torch._inductor import inductor_prims  # noqa: F401  registers the prims
from torch._inductor.virtualized import V

from ipex_inductor.ops.conv.conv import ConvArgs
from ipex_inductor.ops.conv.small_channel_pool import AROUND, STEP, WINDOW
from ipex_inductor.ops.gemm import glu
from ipex_inductor.passes.engine.source import user_line
from ipex_inductor.passes.engine.whole_ops import Table, inline
from ipex_inductor.reporting.decisions import GraphReport

Node = torch.fx.Node
Body = Callable[..., Tensor]
# Takes a node of ours; returns the function that computes it from its arguments, and the kind and
# the reason of the decision. None for the function leaves it to Inductor.
Choose = Callable[[Node], tuple[Body | None, str, str]]

aten, prims = torch.ops.aten, torch.ops.prims
POOLS = (
    aten.max_pool2d_with_indices.default,
    prims._low_memory_max_pool_with_offsets.default,
)
SYCL = "xpu"
FEW_CHANNELS = 4  # the most input channels for which libraries have no good kernel

GATED = "linear|linear+mul"  # two layers on one input, the activation of one times the other
SHORTCUT = "conv|conv+add+relu"  # the sum of two convolutions
POOLED = "conv+relu|max-pool"


def place(
    graph: torch.fx.Graph,
    choose: Choose,
    weights: Container[Node],
    table: Table,
    report: GraphReport,
    traced: dict[Any, torch.fx.GraphModule],
) -> None:
    """Replace groups of ops for which one call is chosen; see `library.place`.

    Args:
        graph: The inference graph, changed in place.
        choose: Returns the chosen call for a node, with the kind and the reason of the decision.
        weights: Nodes that do not change from call to call.
        table: Decompositions for the chosen calls.
        report: Gets the decisions.
        traced: Traced bodies of earlier calls, as a model repeats its layers.
    """
    context = choose, table, report, traced
    for node in graph.find_nodes(op="call_function", target=torch.ops.ipex.linear.default):
        if gate := _gate(node):
            _place_gated(graph, node, gate, *context)
    for node in graph.find_nodes(op="call_function", target=torch.ops.ipex.conv.default):
        if shortcut := _shortcut(node, weights):
            _place_shortcut(graph, node, shortcut, *context)
    for target in POOLS:
        for node in graph.find_nodes(op="call_function", target=target):
            if pooled := _pooled_stem(node):
                _place_pooled(graph, pooled, *context)


def _gate(node: Node) -> Node | None:
    """Return the linear layer whose activation multiplies `node` on a GPU, if a rule made it so."""
    x, _, _, gate, binary, *_ = node.args
    if binary != "mul" or node.meta["val"].device.type in ("cpu", SYCL):
        return None
    assert isinstance(gate, Node)
    pair = gate.target is node.target and gate.args[0] is x and len(gate.users) == 1
    return gate if pair else None


def _place_gated(
    graph: torch.fx.Graph,
    node: Node,
    gate: Node,
    choose: Choose,
    table: Table,
    report: GraphReport,
    traced: dict[Any, torch.fx.GraphModule],
) -> None:
    """Replace a gated pair of layers by the call chosen for it, or by one GEMM with both weights.

    Args:
        graph: The graph, changed in place.
        node: The layer that is multiplied.
        gate: The layer with the activation.
        choose: Returns the chosen call for a node.
        table: Decompositions for the chosen calls.
        report: Gets the decision.
        traced: Traced bodies of earlier calls.
    """
    x, weight, bias, *_ = node.args
    _, gate_weight, gate_bias, _, _, unary, *_ = gate.args
    with graph.inserting_before(node):
        args = (x, gate_weight, weight, gate_bias, bias, unary)
        ours = graph.call_function(torch.ops.ipex.gated_linear.default, args)
    ours.meta = dict(node.meta)
    node.replace_all_uses_with(ours)
    graph.erase_node(node)
    graph.erase_node(gate)
    body, kind, reason = choose(ours)
    report.add(kind, GATED, reason, user_line(node))
    inline(graph, ours, body or glu.reference, table, traced, origins=True, restrides=False)


def _shortcut(node: Node, weights: Container[Node]) -> Node | None:
    """Return the 1 x 1 convolution that `node`, also 1 x 1, adds, if one kernel may do both."""
    added_conv = addend(node, weights)
    if added_conv is None or node.meta["val"].device.type in ("cpu", SYCL):
        return None
    weight, bias, _, *window, _, unary, _, _ = node.args[1:]
    projection, added_bias, *window_of_other = added_conv.args[1:]
    are_one_pixel = is_of_pixels(weight, window) and is_of_pixels(projection, window_of_other)
    value, added = node.meta["val"], added_conv.meta["val"]
    is_static = all(isinstance(size, int) for size in (*value.shape, *added.shape))
    is_alike = is_static and (value.shape, value.dtype) == (added.shape, added.dtype)
    biased = bias is not None or added_bias is not None
    stride: Any = window[0]
    matches = are_one_pixel and is_alike and biased and unary == "relu" and [*stride] == [1, 1]
    return added_conv if matches else None


def _place_shortcut(
    graph: torch.fx.Graph,
    node: Node,
    shortcut: Node,
    choose: Choose,
    table: Table,
    report: GraphReport,
    traced: dict[Any, torch.fx.GraphModule],
) -> None:
    """Replace `node` and the shortcut convolution that it adds by one call, if that was chosen.

    Args:
        graph: The graph, changed in place.
        node: The convolution that adds.
        shortcut: The convolution that is added.
        choose: Returns the chosen call for a node.
        table: Decompositions for the chosen call.
        report: Gets the decision.
        traced: Traced bodies of earlier calls.
    """
    x, weight, bias, *_ = node.args
    source, projection, shortcut_bias, stride, *_ = shortcut.args
    call = (
        torch.ops.ipex.conv_shortcut.default,
        (x, weight, bias or shortcut_bias, source, projection, stride),
    )
    replacement = replace_if_chosen(graph, node, call, choose, report, SHORTCUT, user_line(node))
    if replacement is None:
        return
    ours, body = replacement
    if shortcut_bias is not None:
        with graph.inserting_before(ours):
            ours.args = (x, weight, total(graph, bias, shortcut_bias), source, projection, stride)
    graph.erase_node(node)
    graph.erase_node(shortcut)
    inline(graph, ours, body, table, traced, origins=True, restrides=False)


def _pooled_stem(node: Any) -> Node | None:
    """Return the values of a max pool over a small-channel convolution, else None.

    Nothing may read the pool's indices.
    """
    stem, *pool_args = node.args
    if stem.target is not torch.ops.ipex.conv.default or len(stem.users) != 1:
        return None
    read = [user for user in node.users if user.users]
    x, weight, _, stem_addend, _, _, dilation, transposed, _, groups, *epilogue = stem.args
    value = weight.meta["val"]
    settings = [*pool_args, *([], [0], [1], False)[len(pool_args) - 1 :]]
    *sizes, ceil_mode = settings
    is_supported_pool = [{*size} for size in sizes] == [
        {WINDOW},
        {STEP},
        {AROUND},
        {1},
    ] and not ceil_mode
    is_supported_stem = (
        stem.meta["val"].device.type not in ("cpu", SYCL)
        and value.dim() == 4
        and all(isinstance(n, int) for n in (*value.shape, *x.meta["val"].shape))
        and value.shape[1] <= FEW_CHANNELS
        and (stem_addend, transposed, groups, {*dilation}) == (None, False, 1, {1})
        and epilogue[:2] == ["none", "relu"]
    )
    reads_values = len(read) == 1 and read[0].args[1] == 0
    return read[0] if is_supported_stem and is_supported_pool and reads_values else None


def _place_pooled(
    graph: torch.fx.Graph,
    values: Node,
    choose: Choose,
    table: Table,
    report: GraphReport,
    traced: dict[Any, torch.fx.GraphModule],
) -> None:
    """Replace a pool's values and its small-channel convolution by one call, if that was chosen.

    Args:
        graph: The graph, changed in place.
        values: The values of the pool.
        choose: Returns the chosen call for a node.
        table: Decompositions for the chosen call.
        report: Gets the decision.
        traced: Traced bodies of earlier calls.
    """
    (pool,) = values.all_input_nodes
    (stem,) = pool.all_input_nodes
    x, weight, bias, _, stride, padding, *_ = stem.args
    call = torch.ops.ipex.conv_pool.default, (x, weight, bias, stride, padding)
    replacement = replace_if_chosen(graph, values, call, choose, report, POOLED, user_line(stem))
    if replacement is None:
        return
    ours, body = replacement
    for node in (*pool.users, pool, stem):
        graph.erase_node(node)
    inline(graph, ours, body, table, traced, origins=True, restrides=False)


def replace_if_chosen(
    graph: torch.fx.Graph,
    replaced: Node,
    call: tuple[Any, tuple[Any, ...]],
    choose: Choose,
    report: GraphReport,
    subject: str,
    line: str,
) -> tuple[Node, Body] | None:
    """Replace a node by one call of an op of ours, if a call was chosen for it.

    Args:
        graph: The graph, changed in place.
        replaced: The node whose result the op computes.
        call: The op and its arguments.
        choose: Returns the chosen call for a node.
        report: Gets the decision.
        subject: The name in the report.
        line: The user's source line.

    Returns:
        The new node and the body of the chosen call; None if none was chosen.
    """
    with graph.inserting_before(replaced):
        ours = graph.call_function(*call)
    ours.meta = dict(replaced.meta)
    replaced.replace_all_uses_with(ours)  # the choice also depends on the readers
    body, kind, reason = choose(ours)
    report.add(kind, subject, reason, line)
    if body is None:
        ours.replace_all_uses_with(replaced)
        graph.erase_node(ours)
        return None
    return ours, body


def is_of_pixels(weight: Any, window: Any) -> bool:
    """Return whether a 2D convolution of static sizes is 1 x 1 without padding or groups."""
    stride, padding, _, transposed, _, groups = window
    sizes = weight.meta["val"].shape
    if len(sizes) != 4 or len(stride) != 2 or transposed or groups != 1:
        return False
    is_static = all(isinstance(size, int) for size in sizes)
    return is_static and {*sizes[2:]} == {1} and {*padding} == {0}


def addend(node: Node, weights: Container[Node]) -> Node | None:
    """Return the convolution that `node` adds as its only reader, if their biases may be added.

    They may be added where both do not change from call to call, or there is only one.
    """
    if node.target is not torch.ops.ipex.conv.default:
        return None
    call = ConvArgs.of(node)
    bias, added = call.bias, call.other
    if call.binary != "add":
        return None
    if not isinstance(added, Node) or added.target is not aten.convolution.default:
        return None
    added_bias = added.args[2]
    may_add = added_bias is None or (added_bias in weights and (bias is None or bias in weights))
    return added if may_add and len(added.users) == 1 and added not in node.args[:2] else None


def total(graph: torch.fx.Graph, bias: Any, added_bias: Any) -> Any:
    """Return the sum of both biases as one node, rounded once."""
    if bias is None:
        return added_bias
    exact_sum = _call(graph, aten.add.Tensor, _exact(graph, bias), _exact(graph, added_bias))
    return _call(graph, prims.convert_element_type.default, exact_sum, added_bias.meta["val"].dtype)


def _exact(graph: torch.fx.Graph, bias: Any) -> Node:
    """Return a bias in float64; for a folded bias its value before rounding."""
    if bias.target is prims.convert_element_type.default:
        (source, _) = bias.args
        if source.meta["val"].dtype == torch.float64:
            return source  # type: ignore[no-any-return]
    return _call(graph, prims.convert_element_type.default, bias, torch.float64)


def _call(graph: torch.fx.Graph, op: Any, *args: Any) -> Node:
    node = graph.call_function(op, args)
    with V.fake_mode:
        node.meta["val"] = op(*torch.fx.map_arg(args, lambda n: n.meta["val"]))
    return node
