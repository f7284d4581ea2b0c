"""Several ops of ours, or of torch's, that one kernel of a GPU may compute, where that was chosen.

Else the graph stays as it is: what each gets is chosen as of any other.
"""

from collections.abc import Callable, Container
from typing import Any

import torch
from torch import Tensor
from torch._inductor import inductor_prims  # noqa: F401  registers the prims
from torch._inductor.virtualized import V

from ipex_inductor.ops import gated
from ipex_inductor.ops.stem_pool import AROUND, STEP, WINDOW
from ipex_inductor.passes.engine.source import user_line
from ipex_inductor.passes.engine.whole_ops import Table, inline
from ipex_inductor.reporting.decisions import GraphReport

Node = torch.fx.Node
Body = Callable[..., Tensor]
# For a node of ours: what is to compute it, with its arguments; then the kind and the reason of
# the decision. None for the body leaves it to Inductor.
Choose = Callable[[Node], tuple[Body | None, str, str]]

aten, prims = torch.ops.aten, torch.ops.prims
POOLS = (
    aten.max_pool2d_with_indices.default,
    prims._low_memory_max_pool_with_offsets.default,
)
SYCL = "xpu"
FEW_CHANNELS = 4  # of an image, for which libraries have no good kernel

GATED = "linear|linear+mul"  # two layers on one input, the activation of one times the other
SHORTCUT = "conv|conv+add+relu"  # of both convolutions
POOLED = "conv+relu|max-pool"


def place(
    graph: torch.fx.Graph,
    choose: Choose,
    weights: Container[Node],
    table: Table,
    report: GraphReport,
    traced: dict[Any, torch.fx.GraphModule],
) -> None:
    """Replace ops that are chosen to be one; see `library.place`.

    `traced` has what calls were traced into, as a model repeats its layers.
    """
    known = choose, table, report, traced
    for node in graph.find_nodes(op="call_function", target=torch.ops.ipex.linear.default):
        if gate := _gate(node):
            _place_gated(graph, node, gate, *known)
    for node in graph.find_nodes(op="call_function", target=torch.ops.ipex.conv.default):
        if other := _shortcut(node, weights):
            _place_shortcut(graph, node, other, *known)
    for target in POOLS:
        for node in graph.find_nodes(op="call_function", target=target):
            if made := _pooled_stem(node):
                _place_pooled(graph, made, *known)


def _gate(node: Node) -> Node | None:
    """The layer of which a GPU's layer is multiplied by the activation, if a rule made them so."""
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
    """Replace a pair of layers by the call chosen for it, or by one product with both weights."""
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
    inline(graph, ours, body or gated.reference, table, traced, origins=True, restrides=False)


def _shortcut(node: Node, weights: Container[Node]) -> Node | None:
    """The convolution of one pixel that one of the same kind adds: one kernel may do both."""
    other = addend(node, weights)
    if other is None or node.meta["val"].device.type in ("cpu", SYCL):
        return None
    weight, bias, _, *window, _, unary, _, _ = node.args[1:]
    projection, own, *window_of_other = other.args[1:]
    each = is_of_pixels(weight, window) and is_of_pixels(projection, window_of_other)
    made, added = node.meta["val"], other.meta["val"]
    known = all(isinstance(size, int) for size in (*made.shape, *added.shape))
    alike = known and (made.shape, made.dtype) == (added.shape, added.dtype)
    biased = bias is not None or own is not None
    stride: Any = window[0]
    found = each and alike and biased and unary == "relu" and [*stride] == [1, 1]
    return other if found else None


def _place_shortcut(
    graph: torch.fx.Graph,
    node: Node,
    other: Node,
    choose: Choose,
    table: Table,
    report: GraphReport,
    traced: dict[Any, torch.fx.GraphModule],
) -> None:
    """Replace `node` and the shortcut that it adds, `other`, by one call, if that was chosen."""
    x, weight, bias, *_ = node.args
    source, projection, own, stride, *_ = other.args
    asked = (
        torch.ops.ipex.conv_shortcut.default,
        (x, weight, bias or own, source, projection, stride),
    )
    found = together(graph, node, asked, choose, report, SHORTCUT, user_line(node))
    if found is None:
        return
    ours, body = found
    if own is not None:
        with graph.inserting_before(ours):
            ours.args = (x, weight, total(graph, bias, own), source, projection, stride)
    graph.erase_node(node)
    graph.erase_node(other)
    inline(graph, ours, body, table, traced, origins=True, restrides=False)


def _pooled_stem(node: Any) -> Node | None:
    """The values of a pool, if nobody asks for their places and it is one of a stem."""
    stem, *around = node.args
    if stem.target is not torch.ops.ipex.conv.default or len(stem.users) != 1:
        return None
    read = [user for user in node.users if user.users]
    x, weight, _, other, _, _, dilation, transposed, _, groups, *words = stem.args
    value = weight.meta["val"]
    given = [*around, *([], [0], [1], False)[len(around) - 1 :]]
    *sizes, ceil_mode = given
    alike = [{*size} for size in sizes] == [{WINDOW}, {STEP}, {AROUND}, {1}] and not ceil_mode
    found = (
        stem.meta["val"].device.type not in ("cpu", SYCL)
        and value.dim() == 4
        and all(isinstance(n, int) for n in (*value.shape, *x.meta["val"].shape))
        and value.shape[1] <= FEW_CHANNELS
        and (other, transposed, groups, {*dilation}) == (None, False, 1, {1})
        and words[:2] == ["none", "relu"]
    )
    asked = len(read) == 1 and read[0].args[1] == 0
    return read[0] if found and alike and asked else None


def _place_pooled(
    graph: torch.fx.Graph,
    made: Node,
    choose: Choose,
    table: Table,
    report: GraphReport,
    traced: dict[Any, torch.fx.GraphModule],
) -> None:
    """Replace a pool's values, `made`, and its stem by one call, if that was chosen."""
    (pool,) = made.all_input_nodes
    (stem,) = pool.all_input_nodes
    x, weight, bias, _, stride, padding, *_ = stem.args
    asked = torch.ops.ipex.conv_pool.default, (x, weight, bias, stride, padding)
    found = together(graph, made, asked, choose, report, POOLED, user_line(stem))
    if found is None:
        return
    ours, body = found
    for node in (*pool.users, pool, stem):
        graph.erase_node(node)
    inline(graph, ours, body, table, traced, origins=True, restrides=False)


def together(
    graph: torch.fx.Graph,
    made: Node,
    asked: tuple[Any, tuple[Any, ...]],
    choose: Choose,
    report: GraphReport,
    subject: str,
    line: str,
) -> tuple[Node, Body] | None:
    """An op of ours with its arguments in place of `made`, if a call was chosen for it."""
    with graph.inserting_before(made):
        ours = graph.call_function(*asked)
    ours.meta = dict(made.meta)
    made.replace_all_uses_with(ours)  # what follows it is part of the problem
    body, kind, reason = choose(ours)
    report.add(kind, subject, reason, line)
    if body is None:
        ours.replace_all_uses_with(made)
        graph.erase_node(ours)
        return None
    return ours, body


def is_of_pixels(weight: Any, window: Any) -> bool:
    """Whether a convolution over a plane with that weight reads a pixel for each that it makes."""
    stride, padding, _, transposed, _, groups = window
    sizes = weight.meta["val"].shape
    if len(sizes) != 4 or len(stride) != 2 or transposed or groups != 1:
        return False
    known = all(isinstance(size, int) for size in sizes)
    return known and {*sizes[2:]} == {1} and {*padding} == {0}


def addend(node: Node, weights: Container[Node]) -> Node | None:
    """The convolution that `node` adds, which nobody else reads, if their biases may be added.

    So they may where both are known not to change, or there is one.
    """
    if node.target is not torch.ops.ipex.conv.default or node.args[-4] != "add":
        return None
    bias, other = node.args[2:4]
    if not isinstance(other, Node) or other.target is not aten.convolution.default:
        return None
    own = other.args[2]
    known = own is None or (own in weights and (bias is None or bias in weights))
    return other if known and len(other.users) == 1 and other not in node.args[:2] else None


def total(graph: torch.fx.Graph, bias: Any, own: Any) -> Any:
    """Both biases as one, rounded once."""
    if bias is None:
        return own
    made = _call(graph, aten.add.Tensor, _exact(graph, bias), _exact(graph, own))
    return _call(graph, prims.convert_element_type.default, made, own.meta["val"].dtype)


def _exact(graph: torch.fx.Graph, bias: Any) -> Node:
    """In float64; what a fold rounded, as it was before."""
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
