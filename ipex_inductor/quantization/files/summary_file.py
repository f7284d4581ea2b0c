"""Read a configuration file in any form, and write ours.

Ours has the layers by their stable names, and each quantized tensor once.
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

import msgspec

from ipex_inductor.errors import SummaryFileError
from ipex_inductor.quantization.files import new_summary, old_summary
from ipex_inductor.quantization.files.summary import LayerRecord, Summary, TensorRecord

FORMAT = b"ipex_inductor.quantization"


class LayerEntry(msgspec.Struct):
    """One layer: `inputs` and `output` are names of tensors that are quantized."""

    name: str
    operator: str
    quantized: bool
    inputs: list[str]
    output: str = ""
    reason: str = ""
    weight_channels: int | None = None


class TensorEntry(msgspec.Struct, omit_defaults=True):
    """Scale and zero point of a tensor; `symmetric` ones are int8 or FP8, others uint8."""

    scale: float
    zero_point: int
    symmetric: bool
    is_fp8: bool = False


class OurFile(msgspec.Struct):
    """A file of ours: version 2 has tensors in FP8, which readers of version 1 do not know.

    `smoothing` are SmoothQuant's factors by the names of tensors, `means` the mean inputs of layers
    whose bias is corrected.
    """

    format: Literal["ipex_inductor.quantization"]
    version: Literal[1, 2]
    layers: list[LayerEntry]
    tensors: dict[str, TensorEntry]
    smoothing: dict[str, list[float]] = {}
    means: dict[str, list[float]] = {}


def read_summary(path: str | os.PathLike[str]) -> Summary:
    """Return what a configuration file says: ours, that of IPEX 1.9 to 1.11, or of 1.12 to 2.8.

    Raises:
        SummaryFileError: if it is missing, torn or foreign.
    """
    file = Path(path)
    if not file.is_file():
        advice = "Calibrate the model and save its configuration first."
        raise SummaryFileError("a configuration file", f"no file {str(path)!r}", advice)
    text = file.read_bytes()
    try:
        return _read(str(path), text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SummaryFileError(
            "a configuration file of INT8 quantization",
            f"{str(path)!r}, which is empty, torn or foreign ({error})",
            "Save it anew, by `conf.save` or `save_qconf_summary`.",
        ) from error


def _read(file: str, text: bytes) -> Summary:
    if FORMAT in text[:200]:
        return _read_ours(file, text)
    is_old = text.lstrip()[:1] == b"["
    layers = old_summary.read_entries(text) if is_old else new_summary.read_modules(text)
    if not layers:
        raise msgspec.DecodeError("it has no layers")
    return Summary(file, layers)


def _read_ours(file: str, text: bytes) -> Summary:
    content = msgspec.json.decode(text, type=OurFile)
    layers, tensors = content.layers, content.tensors
    return summary_of(file, layers, tensors, content.smoothing, content.means)


def summary_of(
    file: str,
    layers: Iterable[LayerEntry],
    tensors: Mapping[str, TensorEntry],
    factors: Mapping[str, list[float]],
    means: Mapping[str, list[float]],
) -> Summary:
    """Return the summary of entries in a file of ours.

    Args:
        file: its name in errors.
        layers: its layers.
        tensors: scales by the names of tensors.
        factors: SmoothQuant's factors by the names of tensors.
        means: mean inputs of layers whose bias is corrected.
    """
    scales = {
        name: TensorRecord(tensor.scale, tensor.zero_point, tensor.symmetric, tensor.is_fp8)
        for name, tensor in tensors.items()
    }
    records = tuple(
        LayerRecord(
            operator=entry.operator,
            quantized=entry.quantized,
            inputs=tuple(map(scales.get, entry.inputs)),
            output=scales.get(entry.output),
            name=entry.name,
            weight_channels=entry.weight_channels,
        )
        for entry in layers
    )
    return Summary(file, records, scales, factors, means)


def write_summary(
    path: str | os.PathLike[str],
    layers: Iterable[LayerEntry],
    scales: Mapping[str, TensorRecord | tuple[float, int, bool, bool]],
    smoothing: Mapping[str, list[float]],
    means: Mapping[str, list[float]],
) -> None:
    """Write a file of ours, which is whole or not there.

    Args:
        path: the file.
        layers: its layers.
        scales: scales by the names of tensors.
        smoothing: SmoothQuant's factors by the names of tensors.
        means: mean inputs of layers whose bias is corrected.
    """
    tensors = {name: TensorEntry(*scale) for name, scale in scales.items()}
    content = OurFile(
        format="ipex_inductor.quantization",
        version=2 if any(entry.is_fp8 for entry in tensors.values()) else 1,
        layers=list(layers),
        tensors=tensors,
        smoothing=dict(smoothing),
        means=dict(means),
    )
    write_whole(path, msgspec.json.format(msgspec.json.encode(content), indent=2))


def write_whole(path: str | os.PathLike[str], text: bytes) -> None:
    """Write a file by way of another one, so that no reader finds a part of it."""
    file = Path(path)
    partial_file = file.with_name(f".{file.name}.{os.getpid()}")
    partial_file.write_bytes(text)
    partial_file.replace(file)
