"""Scales and decisions of a prepared model, written to a configuration file and read from one."""

import os
from collections.abc import Iterable

from torch import nn
from torch.fx import GraphModule

from ipex_inductor.errors import SummaryFileError
from ipex_inductor.quantization.capture import LAYER
from ipex_inductor.quantization.model_graph import share_state
from ipex_inductor.quantization.prepared import PreparedModel
from ipex_inductor.quantization.recipe import LayerDecision, plan_graph
from ipex_inductor.quantization.scheme import Scheme, SchemeMapping
from ipex_inductor.quantization.summary import Summary
from ipex_inductor.quantization.summary_file import LayerEntry, read_summary, write_summary


def save_summary(prepared: PreparedModel, path: str | os.PathLike[str]) -> None:
    """Write a configuration file of ours.

    Raises:
        QuantizationError: if the model was not calibrated.
    """
    scales = prepared.scales()
    write_summary(path, layer_entries(prepared.layers), scales.items())


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
    off = set(summary.switched_off(prepared.layers))
    if any(layer.quantized and layer.name in off for layer in prepared.layers):
        _plan_again(prepared, off)
    load_scales(prepared, summary)


def load_scales(prepared: PreparedModel, summary: Summary) -> None:
    """Give a prepared model the scales of a file.

    Raises:
        SummaryFileError: if the file is of another model, or lacks a scale.
    """
    counts = ((layer.name, layer.weight_channels) for layer in prepared.layers)
    summary.check_weights(prepared.layers, {name: n for name, n in counts if n is not None})
    scales = summary.scales(prepared.layers)
    missing = [name for name in prepared.observers if name not in scales]
    if missing:
        raise SummaryFileError(
            "a file with a scale for each quantized tensor",
            f"{summary.file}, which has none for {', '.join(missing[:5])}",
            "Calibrate this model and save its configuration anew.",
        )
    prepared.set_scales({name: scales[name] for name in prepared.observers})


def _plan_again(prepared: PreparedModel, off: set[str]) -> None:
    """Leave more layers of a prepared model in floating point; its observers start anew."""
    schemes = _schemes(prepared)
    mapping = SchemeMapping(
        None, tuple((name, None if name in off else schemes[name]) for name in schemes)
    )
    folds = [layer for layer in prepared.layers if layer.operator == "batch_norm"]
    graph, holder = prepared.plan.order[0].graph, nn.Module()
    share_state(prepared, holder)
    plan = plan_graph(graph, mapping)
    plan.decisions += folds
    PreparedModel.__init__(prepared, GraphModule(holder, graph), plan)


def _schemes(prepared: PreparedModel) -> dict[str, Scheme]:
    """Return the scheme of each quantized layer by its name."""
    plan = prepared.plan
    weights = {weight.layer.meta[LAYER].name: weight.scheme for weight in plan.weights}
    reads = {user.meta[LAYER].name: scheme for (user, _), scheme in plan.reads.items()}
    names = [layer.name for layer in prepared.layers if layer.quantized]
    return {name: weights.get(name) or reads[name] for name in names}
