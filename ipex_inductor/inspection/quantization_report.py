"""`ipex_inductor.quantization.report`: what quantization did to each layer, and what it costs."""

import functools
import io
import itertools
import json
import math
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.text import Text
from torch import Tensor, nn

from ipex_inductor import __version__, compat
from ipex_inductor.errors import QuantizationError
from ipex_inductor.inspection.kernel_times import TIMED_RUNS
from ipex_inductor.inspection.layer_kernels import LayerKernel, find_kernels
from ipex_inductor.inspection.layer_noise import Comparison, compare_graphs
from ipex_inductor.quantization.capture import LAYER
from ipex_inductor.quantization.converted import QuantizedModel
from ipex_inductor.quantization.recipe import LayerDecision
from ipex_inductor.quantization.scheme import TensorScale
from ipex_inductor.quantization.tuning import read_inputs
from ipex_inductor.reporting.html_page import render_page
from ipex_inductor.reporting.listing import Listing, number, show

COLUMNS = 80  # width of `str()`
NAME_COLUMNS = 26  # longest name in the table; longer ones lose their beginning
WORST = 3  # most layers that are marked as the worst; in small models a third of them
UNMEASURED = "not measured"


@dataclass(frozen=True)
class TensorReport:
    """A quantized tensor: type, scale, zero point, and the share of values beyond its range."""

    name: str
    dtype: str
    scale: float
    zero_point: int
    saturated: float


@dataclass(frozen=True)
class LayerReport:
    """One layer.

    `reason` says why it is in floating point, "" if it is not; `kernel_reason` why its kernel is.
    `signal_to_noise` is in dB, of the output behind fused operators and rounding; infinite if it is
    exact, None if it was not measured. `milliseconds` are those of its kernel in one call. `kind`
    is what its kernels read: "int8", "fp8", or "fp8 weights" beside activations in floating point.
    """

    name: str
    operator: str
    quantized: bool
    reason: str
    inputs: tuple[TensorReport, ...]
    output: TensorReport | None
    signal_to_noise: float | None
    kernel: str = ""
    kernel_reason: str = ""
    milliseconds: float | None = None
    kind: str = "int8"

    @property
    def saturated(self) -> float:
        """Return the largest share of saturated values among its inputs and its output."""
        tensors = [*self.inputs, *([self.output] if self.output else [])]
        return max((tensor.saturated for tensor in tensors), default=0.0)

    def to_dict(self) -> dict[str, Any]:
        """Return the layer as plain data without infinite numbers."""
        is_exact = self.signal_to_noise == math.inf
        noise = self.signal_to_noise
        finite = noise if noise is not None and math.isfinite(noise) else None
        kernel = self.kernel or UNMEASURED
        return asdict(self) | {"signal_to_noise": finite, "is_exact": is_exact, "kernel": kernel}


@dataclass(frozen=True)
class QuantizationReport:
    """Layers of a quantized model in the order of their execution; `str()` is a table."""

    title: str
    batches: int
    layers: tuple[LayerReport, ...]

    @property
    def worst(self) -> list[LayerReport]:
        """Return the layers with the lowest signal-to-noise ratio, lowest first."""
        rated = [layer for layer in self.layers if _decibels(layer) < math.inf]
        return sorted(rated, key=_decibels)[: min(WORST, -(-len(rated) // 3))]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data."""
        return {
            "schema": 1,
            **_versions(),
            "title": self.title,
            "batches": self.batches,
            "worst": [layer.name for layer in self.worst],
            "layers": [layer.to_dict() for layer in self.layers],
        }

    def to_json(self) -> str:
        """Return `to_dict` as indented JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def to_html(self) -> str:
        """Return a self-contained page."""
        facts = {
            "report": self,
            "versions": _versions(),
            "totals": _totals(self),
            "total_time": sum(layer.milliseconds or 0 for layer in self.layers),
            "timed_runs": TIMED_RUNS,
            "unmeasured": UNMEASURED,
            "decibels": _show_decibels,
        }
        return render_page(Path(__file__).with_name("quantization_report.html.jinja"), facts)

    def __rich__(self) -> Group:
        """Return the table, for a rich console."""
        notes = _number_reasons(self.layers)
        title = Text(self.title, "bold")
        return Group(title, "", _layer_table(self, notes), "", *_summary(self, notes))

    def __str__(self) -> str:
        """Return the table as a terminal of 80 columns shows it, without colours."""
        console = Console(file=io.StringIO(), width=COLUMNS, color_system=None, force_terminal=True)
        with console.capture() as text:
            show(console, self)
        return "\n".join(line.rstrip() for line in text.get().splitlines())


def report_layers(
    quantized: nn.Module,
    data: Iterable[Any] | Tensor,
    reference: nn.Module | None = None,
    with_kernel_times: bool = True,
    step: Callable[[int], None] = lambda count: None,
) -> QuantizationReport:
    """Return what was done to each layer of a quantized model, and how exact and fast it is.

    Each layer's output is compared with that of the floating point model on the same data. Both
    models run side by side, one batch at a time.

    Args:
        quantized: a statically quantized model, compiled or not.
        data: a tensor, or items that are inputs, or pairs of inputs and labels.
        reference: a floating point model with the same layers; by default the quantized model's own
            weights without rounding.
        with_kernel_times: also compile the model and time the kernel of each layer, with the
            first item.
        step: called after each batch with the number of batches.

    Raises:
        QuantizationError: for another model, no data, or a reference with other layers.
    """
    model = getattr(quantized, "_orig_mod", quantized)
    if not isinstance(model, QuantizedModel):
        raise QuantizationError(
            "a statically quantized model",
            f"a {type(model).__name__}",
            "Pass what `convert` or `load` returned. Dynamic quantization has no scales to report; "
            "`ipex_layers` of the converted model lists its layers.",
        )
    items = iter([data] if isinstance(data, Tensor) else data)
    count = sum(node.op == "placeholder" for node in model.graph.nodes)
    batches = (read_inputs(item, count) for item in items)
    first = next(batches, None)
    rest = batches if first is None else itertools.chain([first], batches)
    comparison = compare_graphs(model, reference, rest, step)
    kernels = find_kernels(model, *first) if with_kernel_times and first else {}
    order = _execution_order(model)
    rows = [_report_layer(layer, model, comparison, kernels) for layer in model.layer_decisions]
    rows.sort(key=lambda row: order.get(row.name, len(order)))
    plural = "es" * (comparison.batches > 1)
    title = f"Quantized layers, compared on {comparison.batches} batch{plural}"
    return QuantizationReport(title, comparison.batches, tuple(rows))


def _execution_order(model: QuantizedModel) -> dict[str, int]:
    names = (node.meta[LAYER].name for node in model.graph.nodes if LAYER in node.meta)
    return {name: index for index, name in enumerate(dict.fromkeys(names))}


def _report_layer(
    layer: LayerDecision,
    model: QuantizedModel,
    comparison: Comparison,
    kernels: Mapping[str, LayerKernel],
) -> LayerReport:
    def tensor(name: str) -> TensorReport:
        scale: TensorScale = scales[name]
        saturation = comparison.saturation.get(name)
        share = saturation.share if saturation else 0.0
        return TensorReport(name, scale.dtype_name, scale.scale, scale.zero_point, share)

    scales = model.tensor_scales()
    noise = comparison.noise.get(layer.output or layer.name)
    kernel = kernels.get(layer.name, LayerKernel())
    return LayerReport(
        name=layer.name,
        operator=layer.operator,
        quantized=layer.quantized,
        reason=layer.reason,
        inputs=tuple(map(tensor, layer.inputs)),
        output=tensor(layer.output) if layer.output else None,
        signal_to_noise=noise.decibels if noise else None,
        kernel=kernel.name,
        kernel_reason=kernel.reason if layer.quantized else "",
        milliseconds=kernel.milliseconds,
        kind=layer.kind or "int8",
    )


def _decibels(layer: LayerReport) -> float:
    return math.inf if layer.signal_to_noise is None else layer.signal_to_noise


def _show_decibels(layer: LayerReport) -> str:
    if layer.signal_to_noise is None:
        return "-"
    return "exact" if layer.signal_to_noise == math.inf else f"{layer.signal_to_noise:.1f}"


def _totals(report: QuantizationReport) -> list[tuple[str, str, str]]:
    """Return the figures at the top of the page: (label, value, level)."""
    kinds = Counter(layer.kind for layer in report.layers if layer.quantized)
    count = kinds.total()
    refused = sum(bool(layer.kernel_reason) for layer in report.layers)
    lowest = _show_decibels(report.worst[0]) if report.worst else "-"
    return [
        *((f"layers in {kind}", str(each), "good") for kind, each in sorted(kinds.items())),
        ("layers in floating point", str(len(report.layers) - count), ""),
        ("without such a kernel", str(refused), "warn" if refused else ""),
        ("lowest signal-to-noise (dB)", lowest, ""),
    ]


def _number_reasons(layers: Sequence[LayerReport]) -> dict[str, int]:
    """Return a number for each reason, in the order of the layers."""
    reasons = (reason for layer in layers for reason in (layer.reason, layer.kernel_reason))
    return {reason: n for n, reason in enumerate(filter(None, dict.fromkeys(reasons)), 1)}


def _layer_table(report: QuantizationReport, notes: Mapping[str, int]) -> Listing:
    """Return the rows of all layers; the worst ones have a mark."""
    columns = (number("dB"), number("saturated"), number("ms"))
    table = Listing("layer", "computed by", "scale, zero point", *columns)
    for layer in report.layers:
        worst = layer in report.worst
        color = "red" if worst else ""
        table.add_row(
            Text(_shorten(layer.name), color),
            _describe_kernel(layer, notes),
            "; ".join(_list_scales(layer)),
            Text(f"{'! ' * worst}{_show_decibels(layer)}", color),
            f"{100 * layer.saturated:.2f}%" if layer.inputs or layer.output else "",
            f"{layer.milliseconds:.3f}" if layer.milliseconds is not None else "-",
        )
    return table


def _shorten(name: str) -> str:
    return name if len(name) <= NAME_COLUMNS else f"...{name[3 - NAME_COLUMNS :]}"


def _describe_kernel(layer: LayerReport, notes: Mapping[str, int]) -> str:
    """Return the kind or "float" with the numbers of reasons, and the parts that were fused."""
    if layer.reason or layer.kernel_reason:
        return f"float [{notes[layer.reason or layer.kernel_reason]}]"
    prefix = f"{layer.kind} "
    fused = layer.kernel.removeprefix(prefix).removesuffix("+quantize").replace("+", " +")
    return f"{prefix}{fused}" if layer.kernel.startswith(prefix) else layer.kind


def _list_scales(layer: LayerReport) -> Iterator[str]:
    for tensor in layer.inputs:
        yield f"in:{tensor.scale:.3g},{tensor.zero_point}"
    if layer.output is not None:
        yield f"out:{layer.output.scale:.3g},{layer.output.zero_point}"


def _summary(report: QuantizationReport, notes: Mapping[str, int]) -> Iterator[Text]:
    """Yield the lines below the table: the worst layers, reasons, meaning of the columns."""
    if report.worst:
        worst = ", ".join(f"{layer.name} {_show_decibels(layer)} dB" for layer in report.worst)
        yield Text(f"! lowest signal-to-noise: {worst}")
    for reason, position in notes.items():
        yield Text(f"[{position}] {reason}")
    if all(layer.milliseconds is None for layer in report.layers):
        yield Text(f"ms: {UNMEASURED}")
    elif any(layer.milliseconds is None for layer in report.layers):
        yield Text(f"ms -: {UNMEASURED}, as the kernel is not of this package or has no record")


@functools.cache
def _versions() -> Mapping[str, str]:
    return types.MappingProxyType({"torch": compat.VERSION, "ipex_inductor": __version__})
