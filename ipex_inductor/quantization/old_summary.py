"""The configuration file of releases 1.9 to 1.11: a list, one object per quantizable call.

The objects lie in the order of execution. `inputs_quantized` is what users edit by hand.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from ipex_inductor.quantization.scheme import TensorScale
from ipex_inductor.quantization.summary import LayerRecord, plain_operator


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
    tensors = zip(
        entry.input_scales, entry.input_zero_points, entry.input_quantized_dtypes, strict=False
    )
    flags = entry.inputs_quantized
    weights = entry.weight_scales
    return LayerRecord(
        operator=plain_operator(entry.name),
        quantized=bool(flags) and all(flags),
        inputs=tuple(TensorScale(s, z, dtype == "int8") for s, z, dtype in tensors),
        name=entry.layer,
        weight_channels=len(weights[0]) if weights and len(weights[0]) > 1 else None,
    )


def write_entries(entries: Sequence[OldEntry]) -> bytes:
    """Return the text of a file: every key of every entry, one key a line, as IPEX wrote it."""
    plain: list[dict[str, Any]] = [
        {name: getattr(entry, name) for name in OldEntry.__struct_fields__} for entry in entries
    ]
    return msgspec.json.format(msgspec.json.encode(plain), indent=4)
