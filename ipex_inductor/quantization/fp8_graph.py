"""Nodes by which a converted graph rounds the operands of linear layers to FP8.

A linear layer on rounded activations computes in fp32: it multiplies, adds the bias and rounds the
result to the dtype of the layer, in this order. A GEMM in FP8 does the same, bit for bit on CPUs.
"""

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Node

from ipex_inductor.errors import QuantizationError
from ipex_inductor.quantization.capture import LAYER
from ipex_inductor.quantization.recipe import QuantizedWeight
from ipex_inductor.quantization.weights import evaluate

aten, ipex = torch.ops.aten, torch.ops.ipex

# Layers with a bias: the product alone, and the arguments of its operands and of the bias.
PRODUCTS: dict[Any, tuple[Any, tuple[int, int], int]] = {
    aten.linear.default: (aten.linear.default, (0, 1), 2),
    aten.addmm.default: (aten.mm.default, (1, 2), 0),
}


def round_tensor(graph: Graph, node: Node, step: Node) -> tuple[Node, Node]:
    """Return the FP8 values of an activation, and what they stand for in fp32."""
    values = graph.call_function(ipex.fp8_quantize_tensor.default, (node, step))
    exact = graph.call_function(ipex.fp8_dequantize.default, (values, step, torch.float32))
    return values, exact


def round_weight(graph: Graph, node: Node, axis: int, dtype: torch.dtype) -> Node:
    """Return a weight rounded to FP8, with a step for each output channel.

    Args:
        graph: the graph.
        node: the weight, a matrix.
        axis: its dimension of output channels.
        dtype: of the result.
    """
    call = graph.call_function
    rows = node if axis == 0 else call(aten.t.default, (node,))
    pair = call(ipex.fp8_quantize_channels.default, (rows,))
    values, steps = (call(operator.getitem, (pair, index)) for index in (0, 1))
    result: Node = call(ipex.fp8_dequantize.default, (values, steps, dtype))
    return result if axis == 0 else call(aten.t.default, (result,))


def widen_layer(graph: Graph, layer: Node, dtype: torch.dtype) -> None:
    """Add the bias of a layer behind its product, and cast the sum to the layer's dtype.

    Args:
        graph: the graph.
        layer: the layer, whose operands are in fp32 by now.
        dtype: of the layer before it was quantized.
    """
    target, operands, place = PRODUCTS.get(layer.target, (layer.target, (0, 1), 2))
    bias: Any = layer.args[place] if len(layer.args) > place else None
    layer.target, layer.args = target, tuple(layer.args[i] for i in operands)
    readers, last = list(layer.users), layer
    is_wide = dtype is torch.float32
    with graph.inserting_before(layer.next):
        if bias is not None:
            exact = bias if is_wide else graph.call_function(aten.to.dtype, (bias, torch.float32))
            last = graph.call_function(aten.add.Tensor, (last, exact))
        if not is_wide:
            last = graph.call_function(aten.to.dtype, (last, dtype))
    if last is not layer:
        last.meta[LAYER] = layer.meta[LAYER]
        for reader in readers:
            reader.replace_input_with(layer, last)


def check_weights(module: nn.Module, weights: Iterable[QuantizedWeight]) -> None:
    """Raise `QuantizationError` if a weight that is rounded to FP8 has NaN or infinite elements.

    Args:
        module: holds the parameters.
        weights: of the layers that are quantized.
    """
    for weight in weights:
        node: Any = weight.layer.args[weight.argument]
        if weight.scheme.is_fp8 and not bool(evaluate(module, node).isfinite().all()):
            raise QuantizationError(
                "a finite weight in each layer that is quantized to FP8",
                f"NaN or infinite elements in the weight of {weight.layer.meta[LAYER].name!r}",
                "Check the checkpoint: the floating-point model has them too.",
            )
