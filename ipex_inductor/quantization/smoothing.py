"""SmoothQuant: move the spread of a linear layer's input channels from activations to weights.

The input of linear layers is multiplied by a factor for each channel, the weight by its
reciprocal, in the graph. Both are one until the model is converted.
"""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from ipex_inductor.errors import QuantizationError, SummaryFileError
from ipex_inductor.quantization.batch_norm import fold_batch_norms
from ipex_inductor.quantization.capture import LAYER, capture_graph
from ipex_inductor.quantization.converted import QuantizedModel, convert_prepared
from ipex_inductor.quantization.operators import is_constant
from ipex_inductor.quantization.prepared import PreparedModel, observe_graph
from ipex_inductor.quantization.qconfigs import SmoothQuant
from ipex_inductor.quantization.scheme import (
    Layer,
    Scheme,
    SchemeMapping,
    TensorScale,
    scale_of_range,
)
from ipex_inductor.quantization.weights import evaluate

aten = torch.ops.aten
FLOOR = 1e-6  # smallest maximum of a channel, as in IPEX


class ChannelObserver(nn.Module):
    """The smallest and the largest value of each channel, the last dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.low: Tensor | None = None
        self.high: Tensor | None = None

    @property
    def is_calibrated(self) -> bool:
        """Return whether any values were observed."""
        return self.low is not None

    @torch.no_grad()
    def forward(self, values: Tensor) -> None:
        """Observe a tensor; other observers see its NaN and infinite values."""
        if values.numel() == 0:
            return
        low, high = torch.aminmax(values.detach().float().reshape(-1, values.shape[-1]), dim=0)
        self.low = low if self.low is None else torch.minimum(self.low, low)
        self.high = high if self.high is None else torch.maximum(self.high, high)


@dataclass
class SmoothedTensor:
    """A tensor that linear layers read multiplied by factors.

    `name` is that of the product, `number` that of its buffers, `weights` are nodes of the linear
    layers' weights in the graph. `factors` are those of a file, until values are observed.
    """

    name: str
    number: int
    weights: list[Node]
    symmetric: bool
    observer: ChannelObserver = field(default_factory=ChannelObserver)
    factors: Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a copy with an observer of its own; nodes are those of the same graph."""
        return replace(self, observer=copy.deepcopy(self.observer, memo))

    def find_factors(self, prepared: nn.Module, alpha: float) -> Tensor:
        """Return the factors of the weight's input channels; that of an activation is 1 / factor.

        Raises:
            QuantizationError: if the tensor was never observed.
        """
        if self.factors is not None and not self.observer.is_calibrated:
            return self.factors
        low, high = self.bounds()
        largest = torch.stack([_largest(prepared, node) for node in self.weights]).amax(0)
        largest = largest.clamp_min(FLOOR)
        activation = torch.maximum(low.abs(), high.abs()).clamp_min(FLOOR)
        return activation.pow(alpha) / largest.pow(1 - alpha)

    def bounds(self) -> tuple[Tensor, Tensor]:
        """Return the smallest and the largest value of each channel."""
        low, high = self.observer.low, self.observer.high
        if low is None or high is None:
            raise QuantizationError(
                "a calibrated model",
                f"no values of {self.name!r}",
                "Call the prepared model with calibration data, or load a summary of scales.",
            )
        return low, high

    def scale(self, factors: Tensor) -> TensorScale:
        """Return the scale of the product."""
        low, high = (bound / factors for bound in self.bounds())
        return scale_of_range(low.min().item(), high.max().item(), self.symmetric)


def _largest(prepared: nn.Module, weight: Node) -> Tensor:
    """Return the largest absolute value of each input channel, without a copy of the weight."""
    value: Tensor = evaluate(prepared, weight).detach()
    largest: Tensor = torch.linalg.vector_norm(value, math.inf, dim=0)
    return largest.float()


def prepare_smoothed(
    model: nn.Module,
    mapping: SchemeMapping,
    smooth: SmoothQuant,
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    bn_folding: bool = True,
) -> PreparedModel:
    """Return a captured copy of `model` with observers, also of the channels of linear inputs.

    Args:
        model: the model; it is not changed.
        mapping: which layer gets which scheme.
        smooth: how factors are computed.
        inputs: example inputs, positional and keyword.
        bn_folding: fold batch norms into the layers before them.
    """
    module = capture_graph(model, *inputs)
    if bn_folding:
        fold_batch_norms(module.graph)
    tensors = _insert_factors(module, mapping, smooth.share)
    prepared = observe_graph(module, mapping, bn_folding)
    attach(prepared, smooth, tensors)
    return prepared


def attach(prepared: PreparedModel, smooth: SmoothQuant, tensors: list[SmoothedTensor]) -> None:
    """Let the observers of smoothed tensors see their channels in a prepared model."""
    for tensor in tensors:
        _observe_channels(prepared, tensor)
    _read_plain_weights(prepared.graph)
    prepared.recompile()
    prepared._ipex_smoothing = smooth, tensors


def _read_plain_weights(graph: Graph) -> None:
    """Let layers read weights without factors, which are ones during calibration.

    A product would be a copy of the weight in each call.
    """
    for product in graph.find_nodes(op="call_function", target=aten.mul.Tensor):
        weight, factor = product.args
        if isinstance(factor, Node) and str(factor.target).startswith("_ipex_smooth_"):
            product.replace_all_uses_with(weight)
            graph.erase_node(product)


def convert_smoothed(prepared: PreparedModel) -> QuantizedModel:
    """Return the quantized form of a prepared model, with the factors that it was observed with."""
    factors = find_scales(prepared)
    quantized = convert_prepared(prepared)
    for number, factor in factors.items():
        quantized.register_buffer(f"_ipex_smooth_{number}", factor, persistent=False)
        quantized.register_buffer(f"_ipex_unsmooth_{number}", 1 / factor, persistent=False)
    return quantized


def find_scales(prepared: PreparedModel) -> dict[int, Tensor]:
    """Give a prepared model the scales of its smoothed tensors; return their factors by number."""
    smooth, tensors = smoothing_of(prepared)
    factors = {t.number: t.find_factors(prepared, smooth.alpha) for t in tensors}
    observed = [t for t in tensors if t.observer.is_calibrated]
    scales = {t.name: t.scale(factors[t.number]) for t in observed}
    prepared.set_tensor_scales({n: s for n, s in scales.items() if n in prepared.tensor_observers})
    return factors


def smoothing_of(prepared: PreparedModel) -> tuple[SmoothQuant, list[SmoothedTensor]]:
    """Return how a prepared model is smoothed, and its smoothed tensors."""
    smoothing: tuple[SmoothQuant, list[SmoothedTensor]]
    smoothing = prepared._ipex_smoothing or (SmoothQuant(), [])
    return smoothing


def factors_of(prepared: PreparedModel) -> dict[str, list[float]]:
    """Return the factors of each smoothed tensor, as a file has them."""
    smooth, tensors = smoothing_of(prepared)
    return {t.name: t.find_factors(prepared, smooth.alpha).tolist() for t in tensors}


def set_factors(prepared: PreparedModel, file: str, factors: Mapping[str, list[float]]) -> None:
    """Use the factors of a file.

    Raises:
        SummaryFileError: if the file is of a model with other smoothed tensors.
    """
    _, tensors = smoothing_of(prepared)
    shapes = {t.name: evaluate(prepared, t.weights[0]).shape[1] for t in tensors}
    if shapes != {name: len(values) for name, values in factors.items()}:
        raise SummaryFileError(
            f"a file with SmoothQuant's factors of {', '.join(shapes) or 'no tensor'}",
            f"{file}, which has those of {', '.join(factors) or 'none'}",
            "Prepare the model with the mapping that it was calibrated with.",
        )
    for tensor in tensors:
        tensor.factors = torch.tensor(factors[tensor.name])
        tensor.observer.low = tensor.observer.high = None


def _insert_factors(
    module: GraphModule, mapping: SchemeMapping, share: bool
) -> list[SmoothedTensor]:
    """Multiply inputs and weights of linear layers by buffers of ones."""
    groups: dict[tuple[Node, Scheme, int], list[Node]] = {}
    for node in list(module.graph.find_nodes(op="call_function", target=aten.linear.default)):
        scheme = mapping.scheme_of(node.meta[LAYER])
        if scheme is not None and scheme.is_fp8:
            raise QuantizationError(
                "SmoothQuant of layers in int8",
                f"a scheme in FP8 for {node.meta[LAYER].name!r}",
                "Leave SmoothQuant out: FP8 keeps its precision over 15 binades of a tensor.",
            )
        if scheme is not None and scheme.bias_correction:
            raise QuantizationError(
                "SmoothQuant without bias correction",
                f"a scheme with bias_correction=True for {node.meta[LAYER].name!r}",
                "Correct biases of a mapping without SmoothQuant.",
            )
        if scheme is not None and is_constant(node.args[1]) and not is_constant(node.args[0]):
            group = 0 if share else len(groups)
            groups.setdefault((node.args[0], scheme, group), []).append(node)
    return [
        _smooth(module, number, linears, scheme.symmetric)
        for number, ((_, scheme, _), linears) in enumerate(groups.items())
    ]


def _smooth(
    module: GraphModule, number: int, linears: list[Node], symmetric: bool
) -> SmoothedTensor:
    """Multiply the input of linear layers, and their weights."""
    graph, first = module.graph, linears[0]
    x, weights = first.args[0], [linear.args[1] for linear in linears]
    assert isinstance(x, Node)
    channels = x.meta["val"].shape[-1]
    for name in (f"_ipex_smooth_{number}", f"_ipex_unsmooth_{number}"):
        module.register_buffer(name, torch.ones(int(channels)), persistent=False)
    path = first.meta[LAYER].module_path
    layer = Layer(f"{path}:smooth:{number}", "smooth", path, first.meta[LAYER].classes)
    product = _multiply(graph, first, (x, f"_ipex_unsmooth_{number}"), layer)
    for linear in linears:
        linear.update_arg(0, product)
        weight = linear.args[1]
        assert isinstance(weight, Node)
        linear.update_arg(
            1, _multiply(graph, linear, (weight, f"_ipex_smooth_{number}"), weight.meta.get(LAYER))
        )
    nodes = [weight for weight in weights if isinstance(weight, Node)]
    return SmoothedTensor(layer.name, number, nodes, symmetric)


def _multiply(graph: Graph, before: Node, operands: tuple[Node, str], layer: Any) -> Node:
    """Return a node, before another one, that multiplies a tensor by a buffer."""
    tensor, buffer = operands
    with graph.inserting_before(before):
        factor = graph.get_attr(buffer)
        product = graph.call_function(aten.mul.Tensor, (tensor, factor))
    factor.meta[LAYER] = Layer(buffer, "parameter", "")
    factor.meta["val"] = torch.empty(tensor.meta["val"].shape[-1], device="meta")
    product.meta = {**tensor.meta, LAYER: layer or Layer(product.name, "parameter", "")}
    return product


def _observe_channels(prepared: PreparedModel, tensor: SmoothedTensor) -> None:
    """Let the prepared model's graph show a tensor's channels to their observer."""
    products = prepared.graph.find_nodes(op="call_function", target=aten.mul.Tensor)
    layers = ((node, node.meta.get(LAYER)) for node in products)
    (product,) = (node for node, layer in layers if layer and layer.name == tensor.name)
    name = f"_ipex_channels_{tensor.number}"
    prepared.add_module(name, tensor.observer)
    with prepared.graph.inserting_after(product):
        prepared.graph.call_module(name, (product.args[0],))
