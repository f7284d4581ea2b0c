"""The configuration file of releases 1.9 to 1.11: a list, one object per quantizable call.

The objects lie in the order of execution. `inputs_quantized` is what users edit by hand.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from ipex_inductor.quantization.files.summary import LayerRecord, TensorRecord, plain_operator


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
    outputs = _tensors(entry.output_scales, entry.output_zero_points, entry.output_quantized_dtypes)
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
) -> tuple[TensorRecord, ...]:
    rows = zip(scales, zero_points, dtypes, strict=False)
    return tuple(TensorRecord(scale, zero, dtype == "int8") for scale, zero, dtype in rows)


def write_entries(entries: Sequence[OldEntry]) -> bytes:
    """Return the text of a file: every key of every entry, one key a line, as IPEX wrote it."""
    plain: list[dict[str, Any]] = [
        {name: getattr(entry, name) for name in OldEntry.__struct_fields__} for entry in entries
    ]
    return msgspec.json.format(msgspec.json.encode(plain), indent=4)
