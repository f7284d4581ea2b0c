"""Entries of `QuantConf.save` about the layers of a calibrated model."""

from collections.abc import Mapping
from typing import Any

from ipex_inductor.quantization.files.old_summary import OldEntry
from ipex_inductor.quantization.files.summary import plain_operator
from ipex_inductor.quantization.prepared import PreparedModel
from ipex_inductor.quantization.recipe import LayerDecision
from ipex_inductor.quantization.scheme import TensorScale
from ipex_inductor.quantization.weights import weight_scales


def entries_of(prepared: PreparedModel, default_recipe: bool) -> list[OldEntry]:
    """Return the entries of a calibrated model: its convolutions, products and embedding bags.

    Args:
        prepared: the model.
        default_recipe: False writes every layer as quantized.

    Raises:
        QuantizationError: if the model was not calibrated.
    """
    scales, weights = prepared.scales(), weight_scales(prepared)
    algorithms = {name: _algorithm(observer) for name, observer in prepared.observers.items()}
    entries: list[OldEntry] = []
    for layer in prepared.layers:
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
