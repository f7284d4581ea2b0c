"""The configuration file of releases 1.9 to 1.11: a list, one object per quantizable call.

The objects lie in the order of execution. `inputs_quantized` is what users edit by hand.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ipex_inductor.quantization.prepared import PreparedModel
from ipex_inductor.quantization.recipe import LayerDecision
from ipex_inductor.quantization.scheme import TensorScale
from ipex_inductor.quantization.summary import LayerRecord, plain_operator
from ipex_inductor.quantization.weights import weight_scales


class OldEntry(msgspec.Struct, omit_defaults=True):
    """One quantizable call. `layer` is ours: the name of the layer, by which it is found again."""

    id: int
    name: str
    algorithm: str = "min_max"
    weight_granularity: str = "per_channel"
    input_scales: list[float] = []
    input_zero_points: list[int] = []
    output_scales: list[float] = []
    output_zero_points: list[int] = []
    weight_scales: list[list[float]] = []
    input_quantized_dtypes: list[str] = []
    output_quantized_dtypes: list[str] = []
    inputs_quantized: list[bool] = []
    outputs_quantized: list[bool] = []
    inputs_flow: list[str] = []
    outputs_flow: list[str] = []
    layer: str = ""


def read_entries(text: bytes) -> tuple[LayerRecord, ...]:
    """Return the layers of a file of releases 1.9 to 1.11, or of `QuantConf.save`.

    Raises:
        msgspec.DecodeError: if it is no such file.
    """
    entries = msgspec.json.decode(text, type=list[OldEntry])
    return tuple(map(_record, entries))


def _record(entry: OldEntry) -> LayerRecord:
    inputs = _tensors(entry.input_scales, entry.input_zero_points, entry.input_quantized_dtypes)
    outputs = _tensors(
        entry.output_scales, entry.output_zero_points, entry.output_quantized_dtypes
    )
    flags, weights = entry.inputs_quantized, entry.weight_scales
    return LayerRecord(
        operator=plain_operator(entry.name),
        quantized=bool(flags) and all(flags),
        inputs=inputs,
        output=outputs[0] if outputs else None,
        name=entry.layer,
        weight_channels=len(weights[0]) if weights and len(weights[0]) > 1 else None,
    )


def _tensors(
    scales: list[float], zero_points: list[int], dtypes: list[str]
) -> tuple[TensorScale, ...]:
    rows = zip(scales, zero_points, dtypes, strict=False)
    return tuple(TensorScale(scale, zero, dtype == "int8") for scale, zero, dtype in rows)


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
    entries = []
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


def write_entries(entries: Sequence[OldEntry]) -> bytes:
    """Return the text of a file: every key of every entry, one key a line, as IPEX wrote it."""
    plain: list[dict[str, Any]] = [
        {name: getattr(entry, name) for name in OldEntry.__struct_fields__} for entry in entries
    ]
    return msgspec.json.format(msgspec.json.encode(plain), indent=4)
