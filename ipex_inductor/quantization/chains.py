"""Chains of operators that run in one kernel: layer, addition, activation."""

from typing import Any

from torch.fx import Node

from ipex_inductor.quantization.capture import LAYER
from ipex_inductor.quantization.operators import ACTIVATIONS, ADDS, LAYERS, readers


def chain_layer(node: Node) -> Node | None:
    """Return the layer that `node` is, or whose kernel can write `node`; None if there is none."""
    if node.target in LAYERS:
        return node
    if node.target in ACTIVATIONS:
        return _fused_layer(node.args[0])
    if node.target in ADDS:
        layers = (_fused_layer(operand) for operand in node.args[:2])
        return next((layer for layer in layers if layer is not None), None)
    return None


def _fused_layer(value: Any) -> Node | None:
    """Return the layer whose kernel writes `value`, if its only reader is fused."""
    if not isinstance(value, Node) or len(readers(value)) != 1:
        return None
    return chain_layer(value)


def is_residual_operand(add: Node, operand: Node) -> bool:
    """Return whether an addition adds `operand` to the output of a convolution."""
    others: list[Any] = [a for a in add.args[:2] if a is not operand]
    layers = [_fused_layer(other) for other in others]
    return any(layer and layer.meta[LAYER].operator.startswith("conv") for layer in layers)
