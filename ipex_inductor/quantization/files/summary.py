"""Configuration files of calibrated scales: their layers, and how they fit those of a model."""

import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar

from ipex_inductor.errors import SummaryFileError

# Operators that a file names as often as the model has them. Others only carry scales along.
PRODUCTS = frozenset(
    {
        *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d"),
        *("conv_transpose3d", "linear", "matmul", "mm", "bmm", "addmm", "embedding_bag"),
    }
)
# Products that IPEX left in floating point and out of its files.
FLOATING_IN_IPEX = frozenset({"conv1d", "conv_transpose1d", "mm", "addmm"})
SHOWN = 8  # mismatches that an error lists

T = TypeVar("T")


class TensorRecord(NamedTuple):
    """Scale and zero point of a tensor; `symmetric` ones are int8 or FP8, others uint8."""

    scale: float
    zero_point: int
    symmetric: bool
    is_fp8: bool = False


@dataclass(frozen=True)
class LayerRecord:
    """One layer in a file; `name` is "" and `module_path` None in files that have none.

    `inputs` and `output` are scales, None where the file has none. `weight_channels` is the number
    of scales of its weight, None for one scale or an unknown number.
    """

    operator: str
    quantized: bool
    inputs: tuple[TensorRecord | None, ...]
    output: TensorRecord | None = None
    module_path: str | None = None
    name: str = ""
    weight_channels: int | None = None


class LayerRow(Protocol):
    """A layer of a prepared model, as far as a file is concerned."""

    @property
    def name(self) -> str:
        """Return the stable name."""

    @property
    def operator(self) -> str:
        """Return the operator, such as "conv2d"."""

    @property
    def module_path(self) -> str:
        """Return the path of the module that calls it."""

    @property
    def inputs(self) -> Sequence[str]:
        """Return the names of the tensors that it reads quantized."""

    @property
    def output(self) -> str:
        """Return the name of its output if that is quantized, else ""."""


Pair = tuple[LayerRecord, LayerRow]


@dataclass(frozen=True)
class Summary:
    """The layers of one file; `file` is its name in errors.

    `tensors` are the scales of a file that names all tensors, `factors` those of SmoothQuant,
    `means` the mean inputs of layers whose bias is corrected. Files of IPEX have none of them.
    """

    file: str
    layers: tuple[LayerRecord, ...]
    tensors: Mapping[str, TensorRecord] = field(default_factory=dict)
    factors: Mapping[str, list[float]] = field(default_factory=dict)
    means: Mapping[str, list[float]] = field(default_factory=dict)

    def match(self, rows: Iterable[LayerRow]) -> list[Pair]:
        """Return each layer of the file with its layer in the model.

        Layers are found by name, else by module and operator, else by operator, in their order.

        Raises:
            SummaryFileError: with a list, if the file has products that the model has not, or the
                other way round.
        """
        records, layers = _group(self.layers, self._key), _group(rows, self._key)
        pairs: list[Pair] = []
        mismatches: list[str] = []
        for key in dict.fromkeys([*layers, *records]):
            here, there = records.get(key, []), layers.get(key, [])
            if len(here) == len(there):
                pairs += zip(here, there, strict=True)
            elif (here or there)[0].operator in PRODUCTS and not self._is_floating(here, there):
                mismatches.append(f"{_show(key)}: {len(here)} in the file, {len(there)} here")
        self._check(mismatches)
        return pairs

    def _is_floating(self, here: Sequence[LayerRecord], there: Sequence[LayerRow]) -> bool:
        """Return whether the layers of a model are such as IPEX left in floating point."""
        is_ours = any(record.name for record in self.layers)
        return not here and not is_ours and there[0].operator in FLOATING_IN_IPEX

    def _key(self, layer: LayerRecord | LayerRow) -> Hashable:
        """Return by what layers of this file are found."""
        if all(record.name for record in self.layers):
            return layer.name
        if all(record.module_path is not None for record in self.layers):
            return layer.module_path, layer.operator
        return layer.operator

    def _check(self, mismatches: Sequence[str]) -> None:
        if mismatches:
            listed = "; ".join(mismatches[:SHOWN])
            rest = f"; and {len(mismatches) - SHOWN} more" * (len(mismatches) > SHOWN)
            raise SummaryFileError(
                "a file with the layers of this model",
                f"{self.file}, which differs: {listed}{rest}",
                "Calibrate this model and save its configuration anew.",
            )

    def switched_off(self, rows: Iterable[LayerRow]) -> list[str]:
        """Return the names of the layers that the file leaves in floating point."""
        products = [row for row in rows if row.operator in PRODUCTS]
        quantized = {row.name for record, row in self.match(products) if record.quantized}
        return [row.name for row in products if row.name not in quantized]

    def scales(self, rows: Iterable[LayerRow]) -> dict[str, TensorRecord]:
        """Return the scale of each tensor of the model that the file has one for."""
        scales = dict(self.tensors)
        pairs = self.match(rows)
        inputs = [pair for c, r in pairs for pair in zip(r.inputs, c.inputs, strict=False)]
        for name, scale in [*inputs, *((row.output, record.output) for record, row in pairs)]:
            if name and scale is not None:
                scales.setdefault(name, scale)
        return scales

    def check_weights(self, rows: Iterable[LayerRow], channels: Mapping[str, int]) -> None:
        """Raise if weights of the model have other numbers of channels than the file says.

        Args:
            rows: the layers of the model.
            channels: the number of output channels, by the names of layers.

        Raises:
            SummaryFileError: with a list.
        """
        self._check(
            [
                f"{row.name}: {count} channels in the file, {channels[row.name]} here"
                for record, row in self.match(rows)
                if (count := record.weight_channels) is not None
                and count != channels.get(row.name, count)
            ]
        )


def _group(layers: Iterable[T], key: Callable[[T], Hashable]) -> dict[Hashable, list[T]]:
    groups: dict[Hashable, list[T]] = {}
    for layer in layers:
        groups.setdefault(key(layer), []).append(layer)
    return groups


def _show(key: Hashable) -> str:
    return ":".join(key) if isinstance(key, tuple) else str(key)


def plain_operator(name: str) -> str:
    """Return the name of an operator without what marks it as in place or private.

    Module classes have their function's name: `Conv2d` is "conv2d".
    """
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.strip("_")).lower()
    return words.replace("re_lu", "relu")
