"""Bias correction: what rounded weights add to the mean of each output channel, subtracted again.

A layer's weights are rounded once, so their errors do not average out over inputs whose mean is not
zero. The correction is the rounding error times the mean input of each channel, as in Nagel et
al., "Data-Free Quantization Through Weight Equalization and Bias Correction". It is computed in the
graph from the weights of the time, so weights that change are corrected too.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

from ipex_inductor.quantization.capture import tensor_type
from ipex_inductor.quantization.operators import WEIGHTED
from ipex_inductor.quantization.recipe import QuantizedWeight

aten = torch.ops.aten


class MeanObserver(nn.Module):
    """The mean of each channel of a layer's input over all calibration data."""

    def __init__(self, channel_dim: int) -> None:
        super().__init__()
        self.channel_dim = channel_dim  # counted from the last one
        self.reset()

    def reset(self, mean: Tensor | None = None) -> None:
        """Forget all values; `mean` is the result until new ones are observed."""
        self.total: Tensor | None = None
        self.count = 0
        self.loaded_mean = mean

    @torch.no_grad()
    def forward(self, values: Tensor) -> None:
        """Observe a tensor."""
        values = values.detach().unsqueeze(0)  # also of one dimension
        channels = values.shape[self.channel_dim]
        others = [dim for dim in range(values.dim()) if dim != values.dim() + self.channel_dim]
        total = values.sum(others, dtype=torch.float64)
        self.total = total if self.total is None else self.total + total
        self.count += values.numel() // channels

    def mean(self) -> Tensor | None:
        """Return the mean of each channel, None if nothing was observed or loaded."""
        if self.total is None or not self.count:
            return self.loaded_mean
        return (self.total / self.count).float()


def is_corrected(weight: QuantizedWeight) -> bool:
    """Return whether the bias of a layer is corrected: of linear layers and convolutions."""
    is_plain = weight.layer.target in WEIGHTED and (weight.argument, weight.axis) == (1, 0)
    return weight.scheme.bias_correction and is_plain


def make_mean_observer(weight: QuantizedWeight) -> MeanObserver:
    """Return an observer of a layer's input."""
    return MeanObserver(1 - _weight_size(weight)[0].dim())


def correct_bias(graph: Graph, layer: Node, weight: QuantizedWeight, mean: Node) -> None:
    """Add the correction to the bias of a layer whose weight is quantized.

    Args:
        graph: the graph.
        layer: the layer's node in it.
        weight: what the plan says about the weight.
        mean: the mean of each input channel.
    """
    value, groups = _weight_size(weight)
    exact: Any = layer.args[1].args[0].args[0]  # type: ignore[union-attr]
    call = graph.call_function
    with graph.inserting_before(layer):
        error = call(aten.sub.Tensor, (exact, layer.args[1]))
        if value.dim() > 2:
            error = call(aten.sum.dim_IntList, (error, list(range(2, value.dim()))))
        outputs, inputs = value.shape[:2]
        error = call(aten.reshape.default, (error, [groups, outputs // groups, inputs]))
        means = call(aten.reshape.default, (mean, [groups, 1, inputs]))
        shift = call(aten.sum.dim_IntList, (call(aten.mul.Tensor, (error, means)), [2]))
        shift = call(aten.reshape.default, (shift, [outputs]))
        if value.dtype is not torch.float32:
            shift = call(aten.to.dtype, (shift, value.dtype))
        bias = layer.args[2] if len(layer.args) > 2 else None
        shift = call(aten.add.Tensor, (bias, shift)) if bias is not None else shift
    layer.args = (*layer.args[:2], shift, *layer.args[3:])


def _weight_size(weight: QuantizedWeight) -> tuple[Tensor, int]:
    """Return the weight's value in the plan, and the number of groups."""
    layer = weight.layer
    node: Any = layer.args[weight.argument]
    assert tensor_type(node) is not None
    groups: Any = layer.args[6] if len(layer.args) > 6 else 1
    return node.meta["val"], groups
