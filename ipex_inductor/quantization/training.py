"""Quantization-aware training: the converted graph with gradients that pass its rounding.

Rounding has no useful gradient. The trained graph computes what the converted model computes, and
its backward treats rounding as the identity inside the quantized range and as a constant outside.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

from ipex_inductor import compat
from ipex_inductor.errors import QuantizationError
from ipex_inductor.quantization.converted import QuantizedModel
from ipex_inductor.quantization.graphs.model_graph import ModelGraph, copy_graph, share_state


def prepare_qat(model: nn.Module) -> nn.Module:
    """Return a trainable form of a converted model that shares its parameters.

    Scales of activations stay those of the calibration, and batch norms stay folded with their
    running statistics. Scales of weights follow the weights. Train what is returned; the converted
    model then has the trained weights, and needs no second conversion.

    Args:
        model: what `convert` returned for a static scheme.

    Raises:
        QuantizationError: for any other model.
    """
    if not isinstance(model, QuantizedModel):
        raise QuantizationError(
            "a statically quantized model that `convert` returned",
            f"a {type(model).__name__}",
            "Call prepare, calibrate and convert first; dynamic quantization cannot be trained.",
        )
    if any(layer.quantized and layer.kind != "int8" for layer in model.layer_decisions):
        raise QuantizationError(
            "a model in int8",
            "layers in FP8",
            "Train in FP8 with quantization.fp8.prepare_fp8 and fp8_autocast.",
        )
    graph, _ = copy_graph(model.graph)
    for node in list(graph.nodes):
        if node.target in _dequantize_operators():
            _pass_gradients(graph, node)
    holder = nn.Module()
    share_state(model, holder)
    return ModelGraph(holder, graph)


def _dequantize_operators() -> tuple[Any, ...]:
    ops = compat.quantized_ops()
    return ops.dequantize_per_tensor.tensor, ops.dequantize_per_channel.default


def _pass_gradients(graph: Graph, dequantize: Node) -> None:
    """Let the backward of a pair of quantize and dequantize nodes reach what is quantized."""
    quantize: Any = dequantize.args[0]
    is_weight = dequantize.target is compat.quantized_ops().dequantize_per_channel.default
    bounds = () if is_weight else dequantize.args[1:5]
    readers = list(dequantize.users)
    with graph.inserting_after(dequantize):
        value = graph.call_function(straight_through, (quantize.args[0], dequantize, *bounds))
    for reader in readers:
        reader.replace_input_with(dequantize, value)


def straight_through(
    exact: Tensor,
    rounded: Tensor,
    scale: Tensor | None = None,
    zero_point: Tensor | int = 0,
    low: int = 0,
    high: int = 0,
) -> Tensor:
    """Return `rounded` with the gradient of `exact`, which is zero outside of the range.

    Args:
        exact: the tensor before it was quantized.
        rounded: the tensor after it was dequantized.
        scale: one step; None if nothing is outside of the range.
        zero_point: the quantized value of zero.
        low: the smallest quantized value.
        high: the largest quantized value.
    """
    if scale is not None:
        exact = torch.clamp(exact, (low - zero_point) * scale, (high - zero_point) * scale)
    return rounded.detach() + (exact - exact.detach())  # the second term is zero
