"""What a GPU's libraries have of a product with its epilogue: one call where that was chosen.

Everything else is written in torch's ops again before Inductor's passes look, so that they find the
graph they would have without us.
"""

import math
from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import Tensor

from ipex_inductor.ops.conv_weight import ALONE
from ipex_inductor.passes.engine.source import user_line
from ipex_inductor.passes.engine.whole_ops import Table, inline
from ipex_inductor.passes.fusion import joined
from ipex_inductor.passes.fusion.joined import FEW_CHANNELS, SYCL, Choose, addend
from ipex_inductor.passes.weights.packing import REFERENCES, is_transpose, name_of
from ipex_inductor.reporting.decisions import GraphReport

Node = torch.fx.Node

aten, prims = torch.ops.aten, torch.ops.prims

GPUS = ("cuda", "xpu")
NARROW = 32  # channels of a result, for which libraries have no good kernel

# What follows convolutions of known nets, all of which our templates have behind theirs.
ACTIVATIONS = (
    *("elu", "gelu", "gelu_tanh", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu"),
    *("mish", "relu", "sigmoid", "silu", "tanh"),
)

# (binary, unary) behind each product that some call has: a library's, or a template of ours.
EPILOGUES = {
    "conv": {("add", "relu"), ("add", "none"), *(("none", word) for word in ACTIVATIONS)},
    # Others would keep layers on one input from being one product (`shared_input`).
    "linear": {("none", "relu"), ("none", "gelu_tanh"), ("none", "gelu")},
}

# Kernels in SYCL have every word besides.
SYCL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

HALVES = (torch.bfloat16, torch.float16)
VECTOR = 16  # bytes, that a GPU reads or writes at once

# So many rows may be multiplied by a template of ours, behind which Inductor fuses any activation.
FEW_ROWS = 32


def why_not(product: str, values: Mapping[str, Any]) -> str | None:
    """Why no call has this epilogue behind `product` on a GPU, None when one may."""
    if values["x"].device.type == SYCL:
        known = {v.dtype for v in values.values() if isinstance(v, Tensor)}
        odd = ", ".join(sorted(map(str, known - {*SYCL_DTYPES})))
        return f"no kernel in SYCL is for {odd}: Inductor's own follows" if odd else None
    if torch.version.hip:
        return "no fused kernel for ROCm yet: Inductor's own is kept"
    words = (values["binary"], values["unary"])
    ours = product == "linear" and words[0] == "none" and _has_few_rows(values["x"])
    if not ours and words not in EPILOGUES.get(product, ()):
        return "no library of this GPU has the epilogue: Inductor's own kernel follows the product"
    return None


def why_not_gated(
    x: Tensor, weight: Tensor, bias: Tensor | None, gate: Tensor, gate_bias: Tensor | None
) -> str | None:
    """Why no kernel of a GPU is asked for a gated pair of layers, None when one is."""
    if x.device.type == SYCL or torch.version.hip:
        return f"no fused pair for {'ROCm' if torch.version.hip else SYCL} yet"
    if _has_few_rows(x):
        return "of few rows the layers are joined, or have an epilogue each"
    if weight.shape != gate.shape or (bias is None) != (gate_bias is None):
        return "both layers are not alike"
    biases = (each for each in (bias, gate_bias) if each is not None)
    if any(each.shape != weight.shape[:1] for each in biases):
        return "an addend is no bias"
    return None


def _has_few_rows(x: Tensor) -> bool:
    sizes = x.shape[:-1]
    return all(isinstance(n, int) for n in sizes) and math.prod(sizes) <= FEW_ROWS


def nothing(node: Node) -> tuple[None, str, str]:
    """The `Choose` of who has no calls."""
    return None, "missed", "no call of a library is looked for here"


def place(
    graph: torch.fx.Graph,
    choose: Choose,
    weights: Container[Node],
    table: Table,
    report: GraphReport,
) -> None:
    """Replace every op of ours that is on a GPU by the call chosen for it, or by torch's ops.

    `table`: what those are decomposed by. `weights` are known not to change from call to call.
    """
    for node in graph.find_nodes(op="call_function", target=aten.convolution.default):
        if _has_templates(node) or _is_sycls(node, weights):
            _adopt(graph, node)
    for target in (aten.mm.default, aten.addmm.default):
        for node in graph.find_nodes(op="call_function", target=target):
            if _is_layer(node, weights):
                _adopt_layer(node)
    traced: dict[Any, torch.fx.GraphModule] = {}  # a model repeats its layers
    joined.place(graph, choose, weights, table, report, traced)
    for node in list(graph.nodes):
        if node.target not in REFERENCES or node.meta["val"].device.type == "cpu":
            continue
        body, kind, reason = choose(node)
        if body is not None and _takes_bias(node, weights):
            _take_bias(graph, node)
            reason += "; the bias of its addend is added to its own"
        report.add(kind, name_of(node), reason, user_line(node))
        inline(
            graph,
            node,
            body or REFERENCES[node.target],
            table,
            traced,
            origins=True,
            restrides=False,
        )


def place_images(graph: torch.fx.Graph, choose: Choose, table: Table, report: GraphReport) -> None:
    """Replace convolutions of a training graph for which there are templates by the call chosen.

    On NVIDIA GPUs. Without a choice the node stays as it is. What follows it is left out of the
    question: statistics of its result do.
    """
    traced: dict[Any, torch.fx.GraphModule] = {}
    for node in graph.find_nodes(op="call_function", target=aten.convolution.default):
        nvidia = node.meta["val"].device.type == "cuda" and not torch.version.hip
        if not (nvidia and _has_templates(node)):
            continue
        x, weight, bias, *window = node.args
        with graph.inserting_before(node):
            args = (x, weight, bias, None, *window, "none", "none", [], "")
            ours = graph.call_function(torch.ops.ipex.conv.default, args)
        ours.meta = dict(node.meta)
        body, kind, reason = choose(ours)
        report.add(kind, name_of(ours), reason, user_line(node))
        if body is None:
            graph.erase_node(ours)
            continue
        node.replace_all_uses_with(ours)
        graph.erase_node(node)
        inline(graph, ours, body, table, traced, origins=True, restrides=False)


def place_weight_gradients(
    graph: torch.fx.Graph, choose: Choose, table: Table, report: GraphReport
) -> None:
    """Replace what makes nothing but the weight's gradient of a stem, by the call chosen for it.

    Without a choice the node stays as it is. What follows the gradient is left out of the question:
    a weight of few channels is small.
    """
    traced: dict[Any, torch.fx.GraphModule] = {}
    for node in graph.find_nodes(op="call_function", target=aten.convolution_backward.default):
        if not _is_stems(node):
            continue
        (made,) = node.users
        grad, x, weight, _, *around, _, _, groups, _ = node.args
        with graph.inserting_before(node):
            args = (grad, x, weight, *around, groups)
            ours = graph.call_function(torch.ops.ipex.conv_weight_grad.default, args)
        ours.meta = {**node.meta, "val": made.meta["val"]}
        body, kind, reason = choose(ours)
        report.add(kind, "weight gradient", reason, user_line(node))
        if body is None:
            graph.erase_node(ours)
            continue
        made.replace_all_uses_with(ours)
        graph.erase_node(made)
        graph.erase_node(node)
        inline(graph, ours, body, table, traced, origins=True, restrides=False)


def _is_stems(node: Any) -> bool:
    """Whether it is the weight's gradient alone, on a GPU, of a convolution of few channels."""
    _, _, weight, _, _, _, _, transposed, _, groups, asked = node.args
    value = weight.meta["val"]
    known = value.dim() == 4 and all(isinstance(size, int) for size in value.shape)
    if value.device.type != "cuda" or transposed or groups != 1 or [*asked] != ALONE:
        return False
    return bool(known and value.shape[1] <= FEW_CHANNELS and len(node.users) == 1)


def _has_templates(node: Node) -> bool:
    """Whether templates of ours are for such a convolution: of or to few channels, or in groups."""
    x, weight, *_, groups = node.args
    assert isinstance(x, Node)
    assert isinstance(weight, Node)
    sizes = weight.meta["val"].shape
    known = len(sizes) == 4 and all(isinstance(size, int) for size in sizes)
    if x.meta["val"].device.type == "cpu" or not known:
        return False
    made, channels, *window = sizes
    few = channels <= FEW_CHANNELS or made <= NARROW
    return bool(groups != 1 or (few and {*window} != {1}))  # of one pixel it is a product


def _is_sycls(node: Node, weights: Container[Node]) -> bool:
    """Whether kernels in SYCL may be for it: on an Intel GPU, on a weight that can be packed."""
    weight, value = node.args[1], node.meta["val"]
    plain = node.target is not aten.convolution.default or (value.dim() == 4 and not node.args[6])
    return value.device.type == SYCL and weight in weights and plain


def _adopt(graph: torch.fx.Graph, node: Node) -> None:
    """Make a plain convolution an op of ours, with nothing behind it."""
    x, weight, bias, *window = node.args
    node.target = torch.ops.ipex.conv.default
    node.args = (x, weight, bias, None, *window, "none", "none", [], "")


def _is_layer(node: Node, weights: Container[Node]) -> bool:
    """Whether it is a linear layer that a template of ours may compute.

    On an Intel GPU any on a weight that can be packed, on others of few rows, or uneven ones.
    """
    *bias, x, weight = node.args
    if node.kwargs or torch.version.hip or node.meta["val"].device.type == "cpu":
        return False
    assert isinstance(x, Node)
    assert isinstance(weight, Node)
    columns = weight.meta["val"].shape[1:]
    vector = all(isinstance(b, Node) and b.meta["val"].shape == columns for b in bias)
    if not (vector and is_transpose(weight)):
        return False
    if x.meta["val"].device.type == SYCL:
        return weight.args[0] in weights
    uneven = _is_uneven(node.meta["val"]) and weight.args[0] in weights
    return uneven or _has_few_rows(x.meta["val"])


def _is_uneven(result: Tensor) -> bool:
    """Whether its rows do not begin at whole vectors, which libraries may be slow at."""
    known = all(isinstance(n, int) for n in result.shape) and result.dtype in HALVES
    return known and bool(result.shape[-1] * result.itemsize % VECTOR)


def _adopt_layer(node: Node) -> None:
    """Make a product an op of ours, with nothing behind it."""
    *bias, x, transposed = node.args
    assert isinstance(transposed, Node)
    node.target = torch.ops.ipex.linear.default
    weight = transposed.args[0]
    node.args = (x, weight, bias[0] if bias else None, None, "none", "none", [], False)


def _takes_bias(node: Node, weights: Container[Node]) -> bool:
    """Whether `node` adds a convolution whose bias it may add with its own.

    cuDNN adds the bias of a convolution without a relu in a kernel of its own.
    """
    other = addend(node, weights)
    return other is not None and other.args[2] is not None


def _take_bias(graph: torch.fx.Graph, node: Node) -> None:
    x, weight, bias, other, *rest = node.args
    assert isinstance(other, Node)
    with graph.inserting_before(node):
        total = joined.total(graph, bias, other.args[2])
    other.args = (*other.args[:2], None, *other.args[3:])
    node.args = (x, weight, total, other, *rest)
