"""Compute products on weights by SYCL kernels, where they are enabled and available."""

import math
from collections.abc import Callable, Container
from typing import Any

import torch

from ipex_inductor.passes.weights.packing import Product, name_of, packable, transpose_weights
from ipex_inductor.reporting.decisions import GraphReport

Node = torch.fx.Node
ipex = torch.ops.ipex

DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})  # of products on any CPU

# Takes dtype, how rows are gathered, whether there is one row, binary and unary; returns a reason
# or "".
WhyNot = Callable[[torch.dtype, str, bool, str, str], str]


def take(
    graph: torch.fx.Graph, weights: Container[Node], report: GraphReport, why_not: WhyNot
) -> None:
    """Have every linear layer and convolution on one of `weights` computed by `ipex::sycl_*`.

    A product for which `why_not` has a reason is left to oneDNN.
    """
    transpose_weights(graph, weights)
    for node, product in packable(graph, weights):
        value = node.meta["val"]
        x, _, bias, addend, *rest = product.args(product.weight)
        *window, binary, unary, scalars, packed = rest
        kind = _kind(window, value)
        one = kind == "rows" and all(isinstance(n, int) for n in value.shape)
        one = one and math.prod(value.shape[:-1]) == 1
        reason = (
            why_not(value.dtype, kind, one, binary, unary) if kind else "no template supports it"
        )
        if reason:
            report.add("missed", f"SYCL: {name_of(node)}", reason)
            continue
        report.add("choice", name_of(node), "a kernel in SYCL")
        columns, size = product.weight.meta["val"].shape[0], product.weight.meta["val"].shape[2:]
        epilogue = (binary, unary, scalars)
        with graph.inserting_before(node):
            dilation, groups = ([*window[2]], window[5]) if window else ([], 1)
            ready = _pack_weight(graph, product, dilation, groups)
            args: tuple[Any, ...] = (x, ready, columns, bias, addend)
            if window:
                stride, padding = ([*lengths] for lengths in window[:2])
                args += ([*size], stride, padding, dilation, groups, *epilogue)
                call = graph.call_function(
                    ipex.sycl_conv.default, (*args, packed == "channels_last")
                )
            else:
                call = graph.call_function(ipex.sycl_linear.default, (*args, *epilogue))
        call.meta = dict(node.meta)
        node.replace_all_uses_with(call)
        graph.erase_node(node)


def _kind(window: Any, value: torch.Tensor) -> str:
    """Return how rows are gathered: "rows" (linear), "window" or "groups"; else ""."""
    if not window:
        return "rows"
    _, _, _, transposed, _, groups = window
    if transposed or value.dim() != 4:
        return ""
    return "groups" if groups > 1 else "window"


def _pack_weight(graph: torch.fx.Graph, product: Product, dilation: list[int], groups: int) -> Node:
    op, weight = ipex.sycl_packed.default, product.weight
    node = graph.call_function(op, (weight, dilation, groups))
    value = weight.meta["val"]
    with value.fake_mode:
        node.meta["val"] = op(value, dilation, groups)
    return node
