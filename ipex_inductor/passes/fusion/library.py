"""Compute a product with its epilogue by one GPU library call or template, where that was chosen.

Everything else is written in torch's ops again before Inductor's passes run, so that they find the
graph that they would have without us.
"""

import math
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ipex_inductor.ops.conv.conv_weight import ALONE
from ipex_inductor.ops.quant import int8_scaled
from ipex_inductor.passes.engine.source import user_line
from ipex_inductor.passes.engine.whole_ops import Table, inline
from ipex_inductor.passes.fusion import joined
from ipex_inductor.passes.fusion.joined import FEW_CHANNELS, SYCL, Choose, addend
from ipex_inductor.passes.weights.packing import REFERENCES, is_transpose, name_of
from ipex_inductor.reporting.decisions import GraphReport

Node = torch.fx.Node

aten, prims = torch.ops.aten, torch.ops.prims

# Measures nodes of ours; returns what was measured, or "".
Measure = Callable[[Iterable[Node]], str]
FIRST_CALL = "measured at the first call"  # subject of the report

# Ops of ours, and functions that compute them on a GPU by torch's ops.
BODIES = {**REFERENCES, **int8_scaled.BODIES}
POOL = torch.ops.ipex.int8_max_pool.default
GPUS = ("cuda", "xpu")
NARROW = 32  # the most output channels for which libraries have no good kernel

# Activations behind convolutions of known networks; our templates fuse all of them.
ACTIVATIONS = (
    *("elu", "gelu", "gelu_tanh", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu"),
    *("mish", "relu", "sigmoid", "silu", "tanh"),
)

# Epilogues (binary, unary) of each product that some library call or template of ours has.
EPILOGUES = {
    "conv": {
        ("add", "relu"),
        ("add", "none"),
        *(("none", activation) for activation in ACTIVATIONS),
    },
    # Others would keep layers on one input from being joined (`shared_input`).
    "linear": {("none", unary) for unary in ("relu", "gelu_tanh", "gelu", "quick_gelu")},
}

# SYCL kernels have every epilogue in these dtypes.
SYCL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

HALVES = (torch.bfloat16, torch.float16)
VECTOR = 16  # bytes that a GPU reads or writes at once

# The most rows of a skinny GEMM by our template, behind which Inductor fuses any activation.
FEW_ROWS = 32


def why_not(product: str, values: Mapping[str, Any]) -> str | None:
    """Return why no call has this epilogue behind `product` on a GPU, None when one may."""
    if values["x"].device.type == SYCL:
        dtypes = {v.dtype for v in values.values() if isinstance(v, Tensor)}
        odd = ", ".join(sorted(map(str, dtypes - {*SYCL_DTYPES})))
        return f"no kernel in SYCL is for {odd}: Inductor's own follows" if odd else None
    if torch.version.hip:
        return "no fused kernel for ROCm yet: Inductor's kernel is used"
    epilogue = (values["binary"], values["unary"])
    ours = product == "linear" and epilogue[0] == "none" and _has_few_rows(values["x"])
    if not ours and epilogue not in EPILOGUES.get(product, ()):
        return "no library of this GPU has the epilogue: Inductor's own kernel follows the product"
    return None


def why_not_gated(
    x: Tensor, weight: Tensor, bias: Tensor | None, gate: Tensor, gate_bias: Tensor | None
) -> str | None:
    """Return why no GPU kernel serves a gated pair of layers, None when one may.

    Args:
        x: The input [..., K] of both layers.
        weight: The weight [N, K] of the layer that is multiplied.
        bias: Its bias [N], or None.
        gate: The weight [N, K] of the layer with the activation.
        gate_bias: Its bias [N], or None.
    """
    if x.device.type == SYCL or torch.version.hip:
        return f"no fused pair for {'ROCm' if torch.version.hip else SYCL} yet"
    if _has_few_rows(x):
        return "with few rows the layers are joined or fused one by one"
    if weight.shape != gate.shape or (bias is None) != (gate_bias is None):
        return "the layers differ in weight shape or bias"
    biases = (one_bias for one_bias in (bias, gate_bias) if one_bias is not None)
    if any(one_bias.shape != weight.shape[:1] for one_bias in biases):
        return "an addend is no bias"
    return None


def _has_few_rows(x: Tensor) -> bool:
    sizes = x.shape[:-1]
    return all(isinstance(n, int) for n in sizes) and math.prod(sizes) <= FEW_ROWS


def choose_nothing(node: Node) -> tuple[None, str, str]:
    """Choose no call: the `Choose` of a graph without library calls."""
    return None, "missed", "no call of a library is looked for here"


def measure_nothing(nodes: Iterable[Node]) -> str:
    """Measure no call: the `Measure` of a graph whose kernels are not timed here."""
    return ""


def place(
    graph: torch.fx.Graph,
    choose: Choose,
    weights: Container[Node],
    table: Table,
    report: GraphReport,
    measure: Measure = measure_nothing,
) -> None:
    """Replace every op of ours that is on a GPU by the call chosen for it, or by torch's ops.

    Args:
        graph: The inference graph, changed in place.
        choose: Returns the chosen call for a node, with the kind and the reason of the decision.
        weights: Nodes that do not change from call to call.
        table: Decompositions for the chosen calls.
        report: Gets the decisions.
        measure: Measures nodes for which nothing is recorded, before any is chosen for.
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
    for node in graph.find_nodes(op="call_function", target=POOL):
        if node.meta["val"].device.type != "cpu":
            inline(graph, node, int8_scaled.compute_max_pool, table, traced, restrides=False)
    ours = [n for n in graph.nodes if n.target in BODIES and n.meta["val"].device.type != "cpu"]
    if summary := measure(ours):
        report.add("choice", FIRST_CALL, summary)
    for node in ours:
        body, kind, reason = choose(node)
        if body is not None and _takes_bias(node, weights):
            _take_bias(graph, node)
            reason += "; the bias of its addend is added to its own"
        report.add(kind, name_of(node), reason, user_line(node))
        inline(
            graph,
            node,
            body or BODIES[node.target],
            table,
            traced,
            origins=True,
            restrides=False,
        )


def place_images(graph: torch.fx.Graph, choose: Choose, table: Table, report: GraphReport) -> None:
    """Replace convolutions of a training graph that have templates by the call chosen.

    The pass is for NVIDIA GPUs. Without a choice the node stays as it is. The choice does not
    consider what follows the convolution, which is the statistics of its result.
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
    """Replace weight gradients of small-channel convolutions by the call chosen for them.

    Only a node that computes nothing but the weight's gradient is replaced. Without a choice it
    stays as it is. The choice does not consider what follows the gradient: a weight of few channels
    is small.
    """
    traced: dict[Any, torch.fx.GraphModule] = {}
    for node in graph.find_nodes(op="call_function", target=aten.convolution_backward.default):
        if not _is_stems(node):
            continue
        (gradient,) = node.users
        grad, x, weight, _, *window, _, _, groups, _ = node.args
        with graph.inserting_before(node):
            args = (grad, x, weight, *window, groups)
            ours = graph.call_function(torch.ops.ipex.conv_weight_grad.default, args)
        ours.meta = {**node.meta, "val": gradient.meta["val"]}
        body, kind, reason = choose(ours)
        report.add(kind, "weight gradient", reason, user_line(node))
        if body is None:
            graph.erase_node(ours)
            continue
        gradient.replace_all_uses_with(ours)
        graph.erase_node(gradient)
        graph.erase_node(node)
        inline(graph, ours, body, table, traced, origins=True, restrides=False)


def _is_stems(node: Any) -> bool:
    """Return whether `node` is only the weight gradient of a small-channel convolution on a GPU."""
    _, _, weight, _, _, _, _, transposed, _, groups, output_mask = node.args
    value = weight.meta["val"]
    is_static = value.dim() == 4 and all(isinstance(size, int) for size in value.shape)
    if value.device.type != "cuda" or transposed or groups != 1 or [*output_mask] != ALONE:
        return False
    return bool(is_static and value.shape[1] <= FEW_CHANNELS and len(node.users) == 1)


def _has_templates(node: Node) -> bool:
    """Return whether a convolution of few channels, in or out, or in groups has our templates."""
    x, weight, *_, groups = node.args
    assert isinstance(x, Node)
    assert isinstance(weight, Node)
    sizes = weight.meta["val"].shape
    is_static = len(sizes) == 4 and all(isinstance(size, int) for size in sizes)
    if x.meta["val"].device.type == "cpu" or not is_static:
        return False
    out_channels, channels, *window = sizes
    few = channels <= FEW_CHANNELS or out_channels <= NARROW
    return bool(groups != 1 or (few and {*window} != {1}))  # 1 x 1 convolutions are GEMMs


def _is_sycls(node: Node, weights: Container[Node]) -> bool:
    """Return whether a SYCL kernel may serve a node: on an Intel GPU, on a packable weight."""
    weight, value = node.args[1], node.meta["val"]
    plain = node.target is not aten.convolution.default or (value.dim() == 4 and not node.args[6])
    return value.device.type == SYCL and weight in weights and plain


def _adopt(graph: torch.fx.Graph, node: Node) -> None:
    """Turn a plain convolution into `ipex::conv` without an epilogue, in place."""
    x, weight, bias, *window = node.args
    node.target = torch.ops.ipex.conv.default
    node.args = (x, weight, bias, None, *window, "none", "none", [], "")


def _is_layer(node: Node, weights: Container[Node]) -> bool:
    """Return whether a GEMM is a linear layer that a template of ours may compute.

    On an Intel GPU any layer on a weight that can be packed is; on others, skinny or unaligned
    GEMMs.
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
    """Return whether rows do not begin at whole vectors, which can make libraries slow."""
    is_static = all(isinstance(n, int) for n in result.shape) and result.dtype in HALVES
    return is_static and bool(result.shape[-1] * result.itemsize % VECTOR)


def _adopt_layer(node: Node) -> None:
    """Turn a GEMM into `ipex::linear` without an epilogue, in place."""
    *bias, x, transposed = node.args
    assert isinstance(transposed, Node)
    node.target = torch.ops.ipex.linear.default
    weight = transposed.args[0]
    node.args = (x, weight, bias[0] if bias else None, None, "none", "none", [], False)


def _takes_bias(node: Node, weights: Container[Node]) -> bool:
    """Return whether `node` adds a convolution whose bias it may add with its own.

    CuDNN adds the bias of a convolution without a ReLU in a separate kernel.
    """
    added_conv = addend(node, weights)
    return added_conv is not None and added_conv.args[2] is not None


def _take_bias(graph: torch.fx.Graph, node: Node) -> None:
    x, weight, bias, added_conv, *rest = node.args
    assert isinstance(added_conv, Node)
    with graph.inserting_before(node):
        total = joined.total(graph, bias, added_conv.args[2])
    added_conv.args = (*added_conv.args[:2], None, *added_conv.args[3:])
    node.args = (x, weight, total, added_conv, *rest)
