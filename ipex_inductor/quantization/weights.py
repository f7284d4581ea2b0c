"""Weights of a prepared model: their values as its graph computes them, and their scales."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.fx.node import map_arg

from ipex_inductor.quantization.capture import LAYER
from ipex_inductor.quantization.prepared import PreparedModel
from ipex_inductor.quantization.recipe import QuantizedWeight
from ipex_inductor.quantization.scheme import MIN_SCALE


@torch.no_grad()
def weight_scales(prepared: PreparedModel) -> dict[str, list[float]]:
    """Return the scales of each layer's weight, by the name of the layer."""
    return {
        weight.layer.meta[LAYER].name: _scales(evaluate(prepared, _weight_node(weight)), weight)
        for weight in prepared._ipex_plan.weights
    }


def _scales(value: Tensor, weight: QuantizedWeight) -> list[float]:
    if not weight.scheme.per_channel:
        return [max(torch.linalg.vector_norm(value, math.inf).item() / 127.5, MIN_SCALE)]
    sizes = [size for size in range(value.dim()) if size != weight.axis]
    largest: Tensor = torch.linalg.vector_norm(value, math.inf, dim=sizes).float()
    return (largest / 127.5).clamp_min(MIN_SCALE).tolist()


def _weight_node(weight: QuantizedWeight) -> Node:
    node = weight.layer.args[weight.argument]
    assert isinstance(node, Node)
    return node


def evaluate(module: nn.Module, node: Node) -> Any:
    """Return the value of a node that depends on parameters and buffers alone."""
    if node.op == "get_attr":
        value: Any = module
        for name in str(node.target).split("."):
            value = getattr(value, name)
        return value
    args, kwargs = map_arg((node.args, node.kwargs), lambda each: evaluate(module, each))
    assert callable(node.target)
    return node.target(*args, **kwargs)
