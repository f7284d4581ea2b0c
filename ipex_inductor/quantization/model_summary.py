"""Scales and decisions of a prepared model, written to a configuration file and read from one."""

import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from ipex_inductor.errors import SummaryFileError
from ipex_inductor.quantization.capture import LAYER
from ipex_inductor.quantization.files.old_summary import OldEntry
from ipex_inductor.quantization.files.summary import Summary, TensorRecord, plain_operator
from ipex_inductor.quantization.files.summary_file import LayerEntry, read_summary, write_summary
from ipex_inductor.quantization.graphs.model_graph import share_state
from ipex_inductor.quantization.prepared import PreparedModel
from ipex_inductor.quantization.recipe import LayerDecision, Plan, plan_graph
from ipex_inductor.quantization.scheme import Scheme, SchemeMapping, TensorScale
from ipex_inductor.quantization.smoothing import (
    attach,
    factors_of,
    find_scales,
    set_factors,
    smoothing_of,
)
from ipex_inductor.quantization.weights import weight_scales


def save_summary(prepared: PreparedModel, path: str | os.PathLike[str]) -> None:
    """Write a configuration file of ours.

    Raises:
        QuantizationError: if the model was not calibrated.
    """
    find_scales(prepared)
    scales = prepared.tensor_scales()
    entries, factors = layer_entries(prepared.layer_decisions), factors_of(prepared)
    write_summary(path, entries, scales, factors, means_of(prepared))


def means_of(prepared: PreparedModel) -> dict[str, list[float]]:
    """Return the mean inputs of layers whose bias is corrected, as a file has them."""
    return {name: mean.tolist() for name, mean in prepared._ipex_means().items()}


def layer_entries(layers: Iterable[LayerDecision]) -> list[LayerEntry]:
    """Return the rows of a file about the layers of a model."""
    return [
        LayerEntry(
            name=layer.name,
            operator=layer.operator,
            quantized=layer.quantized,
            inputs=list(layer.inputs),
            output=layer.output,
            reason=layer.reason,
            weight_channels=layer.weight_channels,
        )
        for layer in layers
    ]


def load_summary(prepared: PreparedModel, path: str | os.PathLike[str]) -> None:
    """Give a prepared model the scales and the decisions of a file, ours or one of IPEX.

    Raises:
        SummaryFileError: if it is missing, torn, foreign or of another model.
    """
    summary = read_summary(path)
    off = set(summary.switched_off(prepared.layer_decisions))
    if any(layer.quantized and layer.name in off for layer in prepared.layer_decisions):
        smoothing = smoothing_of(prepared)
        PreparedModel.__init__(prepared, *_plan_again(prepared, off))
        attach(prepared, *smoothing)
    load_scales(prepared, summary)
    set_factors(prepared, summary.file, summary.factors)


def load_scales(prepared: PreparedModel, summary: Summary) -> None:
    """Give a prepared model the scales of a file.

    Raises:
        SummaryFileError: if the file is of another model, or lacks a scale.
    """
    counts = ((layer.name, layer.weight_channels) for layer in prepared.layer_decisions)
    summary.check_weights(
        prepared.layer_decisions, {name: n for name, n in counts if n is not None}
    )
    scales = summary.scales(prepared.layer_decisions)
    missing = [name for name in prepared.tensor_observers if name not in scales]
    if missing:
        raise SummaryFileError(
            "a file with a scale for each quantized tensor",
            f"{summary.file}, which has none for {', '.join(missing[:5])}",
            "Calibrate this model and save its configuration anew.",
        )
    other = _find_other_kinds(prepared, scales)
    if other:
        raise SummaryFileError(
            f"a file with scales in {'int8' if scales[other[0]].is_fp8 else 'FP8'}",
            f"{summary.file}, whose scale of {other[0]!r} is of the other dtype",
            "Prepare the model with the dtype that it was calibrated with, or calibrate it anew.",
        )
    prepared._ipex_load(
        {name: TensorScale(*scales[name]) for name in prepared.tensor_observers},
        {name: torch.tensor(mean) for name, mean in summary.means.items()},
    )


def _find_other_kinds(prepared: PreparedModel, scales: Mapping[str, TensorRecord]) -> list[str]:
    """Return the tensors whose scheme is in FP8 where the scale is not, or the other way round."""
    tensors = prepared._ipex_plan.tensors
    kinds = {tensor.meta[LAYER].name: scheme.is_fp8 for tensor, scheme in tensors.items()}
    return [n for n, is_fp8 in kinds.items() if n in scales and scales[n].is_fp8 != is_fp8]


def plan_without(prepared: PreparedModel, off: set[str]) -> PreparedModel:
    """Return a prepared model that leaves more layers in floating point; observers start anew."""
    result = PreparedModel(*_plan_again(prepared, off))
    result._ipex_example_inputs = prepared._ipex_example_inputs
    result._ipex_bn_folding = prepared._ipex_bn_folding
    attach(result, *smoothing_of(prepared))
    return result


def _plan_again(prepared: PreparedModel, off: set[str]) -> tuple[GraphModule, Plan]:
    schemes = layer_schemes(prepared)
    choices = ((name, None if name in off else scheme) for name, scheme in schemes.items())
    folds = [layer for layer in prepared.layer_decisions if layer.operator == "batch_norm"]
    graph, holder = prepared._ipex_plan.order[0].graph, nn.Module()
    share_state(prepared, holder)
    plan = plan_graph(graph, SchemeMapping(None, tuple(choices)))
    plan.decisions += folds
    return GraphModule(holder, graph), plan


def layer_schemes(prepared: PreparedModel) -> dict[str, Scheme]:
    """Return the scheme of each quantized layer by its name."""
    plan = prepared._ipex_plan
    weights = {weight.layer.meta[LAYER].name: weight.scheme for weight in plan.weights}
    reads = {user.meta[LAYER].name: scheme for (user, _), scheme in plan.reads.items()}
    names = [layer.name for layer in prepared.layer_decisions if layer.quantized]
    return {name: weights.get(name) or reads[name] for name in names}


def entries_of(prepared: PreparedModel, default_recipe: bool) -> list[OldEntry]:
    """Return the entries of a calibrated model: its convolutions, products and embedding bags.

    Args:
        prepared: the model.
        default_recipe: False writes every layer as quantized.

    Raises:
        QuantizationError: if the model was not calibrated.
    """
    scales, weights = prepared.tensor_scales(), weight_scales(prepared)
    algorithms = {
        name: _algorithm(observer) for name, observer in prepared.tensor_observers.items()
    }
    entries: list[OldEntry] = []
    for layer in prepared.layer_decisions:
        if layer.operator != "batch_norm":
            first = layer.inputs[0] if layer.inputs else ""
            entry = _entry(layer, scales, weights.get(layer.name, []), not default_recipe)
            entry.id, entry.algorithm = len(entries), algorithms.get(first, "min_max")
            entries.append(entry)
    return entries


def _entry(
    layer: LayerDecision, scales: Mapping[str, TensorScale], weights: list[float], all_on: bool
) -> OldEntry:
    inputs = [scales[name] for name in layer.inputs]
    outputs = [scales[layer.output]] if layer.output else []
    return OldEntry(
        id=0,
        name=layer.operator,
        weight_granularity="per_channel" if len(weights) > 1 else "per_tensor",
        input_scales=[scale.scale for scale in inputs],
        input_zero_points=[scale.zero_point for scale in inputs],
        output_scales=[scale.scale for scale in outputs],
        output_zero_points=[scale.zero_point for scale in outputs],
        weight_scales=[weights] if weights else [],
        input_quantized_dtypes=[_dtype(scale) for scale in inputs],
        output_quantized_dtypes=[_dtype(scale) for scale in outputs],
        inputs_quantized=[layer.quantized or all_on] * max(len(inputs), 1),
        outputs_quantized=[bool(layer.output)],
        inputs_flow=list(layer.inputs),
        outputs_flow=[layer.output or f"{layer.name}.output"],
        layer=layer.name,
    )


def _dtype(scale: TensorScale) -> str:
    return "int8" if scale.symmetric else "uint8"


def _algorithm(observer: Any) -> str:
    """Return the name of an observer, "moving_averager_min_max" as IPEX wrote it."""
    words = plain_operator(type(observer).__name__.removesuffix("Observer"))
    return {"moving_average": "moving_averager_min_max"}.get(words, words)
