"""Noise of a quantized model's layers: its graph and the floating point graph, side by side.

Both graphs run one node after the other, and a value is dropped behind its last reader. No
activation outlives its batch.
"""

import inspect
import math
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Interpreter, Node

from ipex_inductor import compat
from ipex_inductor.errors import QuantizationError
from ipex_inductor.quantization.batch_norm import fold_batch_norms
from ipex_inductor.quantization.capture import LAYER, capture_graph
from ipex_inductor.quantization.converted import QuantizedModel
from ipex_inductor.quantization.graphs.model_graph import ModelGraph, copy_graph, share_state

ipex = torch.ops.ipex
LARGEST = int(torch.finfo(torch.float8_e4m3fn).max)
Inputs = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass
class Noise:
    """Sums of squares of the floating point values of a tensor, and of what rounding adds."""

    signal: float = 0.0
    noise: float = 0.0

    def add(self, exact: Tensor, rounded: Tensor) -> None:
        """Add the values of one batch."""
        exact, rounded = exact.detach().float(), rounded.detach().float()
        self.signal += exact.square().sum(dtype=torch.float64).item()
        self.noise += (exact - rounded).square().sum(dtype=torch.float64).item()

    @property
    def decibels(self) -> float | None:
        """Return the signal-to-noise ratio: infinite for equal values, None if it has no value."""
        if not math.isfinite(self.signal) or not math.isfinite(self.noise):
            return None
        if not self.noise:
            return math.inf
        return 10 * math.log10(self.signal / self.noise) if self.signal else -math.inf


@dataclass
class Saturation:
    """Counts of the values of a tensor, and of those beyond its quantized range."""

    values: int = 0
    beyond: int = 0

    def add(self, value: Tensor, scale: Any, zero_point: Any, low: int, high: int) -> None:
        """Add the values of one batch.

        Args:
            value: the values in floating point.
            scale: the step.
            zero_point: the quantized value of zero.
            low: the smallest quantized value.
            high: the largest one.
        """
        steps = torch.round(value.detach().float() / scale) + zero_point
        self.values += steps.numel()
        self.beyond += int(((steps < low) | (steps > high)).sum())

    @property
    def share(self) -> float:
        """Return the share of values that are beyond the range, 0 to 1."""
        return self.beyond / self.values if self.values else 0.0


@dataclass
class Comparison:
    """Noise of each compared tensor and saturation of each quantized one, by name."""

    batches: int = 0
    noise: dict[str, Noise] = field(default_factory=dict)
    saturation: dict[str, Saturation] = field(default_factory=dict)


@torch.no_grad()
def compare_graphs(
    quantized: QuantizedModel,
    reference: nn.Module | None,
    batches: Iterable[Inputs],
    step: Callable[[int], None] = lambda count: None,
) -> Comparison:
    """Run a quantized model and its floating point form on data; compare the layers' outputs.

    Args:
        quantized: the model.
        reference: a floating point model with the same layers; None for the quantized model
            without its rounding.
        batches: positional and keyword arguments of each call.
        step: called with the number of batches so far.

    Raises:
        QuantizationError: if there are no data, or the reference has other layers.
    """
    exact = float_graph(quantized) if reference is None else _capture(quantized, reference)
    wanted = {layer.output or layer.name for layer in quantized.layer_decisions}
    wanted &= _names(quantized.graph) & _names(exact.graph)
    if not wanted:
        raise QuantizationError(
            "a reference with the layers of the quantized model",
            "a model with other layers",
            "Pass the model that was quantized, or none: reference=None.",
        )
    result = Comparison()
    for args, kwargs in batches:
        _compare_batch(quantized, exact, wanted, (args, kwargs), result)
        result.batches += 1
        step(result.batches)
    if not result.batches:
        advice = "Its items are inputs, or pairs of inputs and labels."
        raise QuantizationError("data", "none", advice)
    return result


def float_graph(quantized: QuantizedModel) -> ModelGraph:
    """Return a quantized model without its rounding, which shares all parameters."""
    ops = compat.quantized_ops()
    graph, _ = copy_graph(quantized.graph)
    rounding = (
        ops.dequantize_per_tensor.tensor,
        ops.dequantize_per_channel.default,
        ipex.fp8_dequantize.default,
    )
    for node in list(graph.nodes):
        if node.target in rounding:
            values: Any = node.args[0]
            is_item = values.target is operator.getitem  # of an FP8 weight and its steps
            node.replace_all_uses_with((values.args[0] if is_item else values).args[0])
    graph.eliminate_dead_code()
    holder = nn.Module()
    share_state(quantized, holder)
    return ModelGraph(holder, graph)


def _capture(quantized: QuantizedModel, reference: nn.Module) -> nn.Module:
    """Return the graph of a reference, with batch norms folded as in the quantized model."""
    if quantized._ipex_example_inputs is None:
        raise QuantizationError(
            "a quantized model whose example inputs are known",
            "one without",
            "Compare it without a reference: its own weights are in floating point.",
        )
    module = capture_graph(reference, *quantized._ipex_example_inputs)
    if getattr(quantized._ipex_recipe, "bn_folding", True):
        fold_batch_norms(module.graph)
    return module


def _names(graph: Any) -> set[str]:
    return {node.meta[LAYER].name for node in graph.nodes if LAYER in node.meta}


def _compare_batch(
    quantized: nn.Module, exact: nn.Module, wanted: set[str], inputs: Inputs, result: Comparison
) -> None:
    """Run both graphs on a batch, the floating point one just ahead.

    Args:
        quantized: the quantized model.
        exact: the floating point model.
        wanted: names of the tensors to compare.
        inputs: positional and keyword arguments.
        result: gets the sums.
    """
    values = _named_values(exact, wanted, inputs)
    waiting: dict[str, Tensor] = {}
    quantize = compat.quantized_ops().quantize_per_tensor.tensor
    last = _last_nodes(quantized.graph, wanted)
    for node, arguments, value in _run_nodes(quantized, inputs):
        if node.target is quantize:
            tensor, scale, zero_point, low, high, _ = arguments
            name = node.meta[LAYER].name
            saturation = result.saturation.setdefault(name, Saturation())
            saturation.add(tensor, scale, zero_point, low, high)
        if node.target is ipex.fp8_quantize_tensor.default:
            saturation = result.saturation.setdefault(node.meta[LAYER].name, Saturation())
            tensor, step = arguments
            saturation.add(tensor, step, 0, -LARGEST, LARGEST)
        if node in last:
            name = last[node]
            while name not in waiting:
                waiting.update([next(values)])
            result.noise.setdefault(name, Noise()).add(waiting.pop(name), _first_tensor(value))


def _named_values(
    module: nn.Module, wanted: set[str], inputs: Inputs
) -> Iterator[tuple[str, Tensor]]:
    last = _last_nodes(module.graph, wanted)
    for node, _, value in _run_nodes(module, inputs):
        if node in last:
            yield last[node], _first_tensor(value)


def _first_tensor(value: Any) -> Tensor:
    """Return the output of a layer; embedding bags return more than that."""
    tensor: Tensor = value[0] if isinstance(value, (tuple, list)) else value
    return tensor


def _last_nodes(graph: Any, wanted: set[str]) -> dict[Node, str]:
    """Return the last node of each name: a tensor behind its own rounding."""
    nodes = {
        node.meta[LAYER].name: node
        for node in graph.nodes
        if node.op != "get_attr" and LAYER in node.meta and node.meta[LAYER].name in wanted
    }
    return {node: name for name, node in nodes.items()}


def _run_nodes(module: nn.Module, inputs: Inputs) -> Iterator[tuple[Node, Any, Any]]:
    """Yield each node of a module's graph with its arguments and its value."""
    args, kwargs = inputs
    graph = module.graph
    assert isinstance(graph, Graph)
    bound = inspect.signature(module.forward).bind(*args, **kwargs)
    interpreter = Interpreter(module, graph=graph)
    interpreter.args_iter = iter(graph.process_inputs(*bound.arguments.values()))
    for node in graph.nodes:
        if node.op == "output":
            return
        arguments, _ = interpreter.fetch_args_kwargs_from_env(node)
        interpreter.env[node] = interpreter.run_node(node)
        yield node, arguments, interpreter.env[node]
        for finished in interpreter.user_to_last_uses.get(node, ()):
            del interpreter.env[finished]
