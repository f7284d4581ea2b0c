"""`ipex-inductor quantize`: calibrate a model for INT8 within an accuracy budget."""

import json
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ipex_inductor.cli.demo.models import Device, call_user, find_user
from ipex_inductor.cli.model_options import AsJson, Batch, Target, load_model
from ipex_inductor.errors import OptionError
from ipex_inductor.reporting.listing import show

if TYPE_CHECKING:
    import torch

    from ipex_inductor.inspection.quantization_report import QuantizationReport
    from ipex_inductor.quantization.tuning import Step

# Words before the subject of each kind of step.
KINDS = {
    "recipe": "calibrate",
    "sensitivity": "sensitivity of",
    "floating": "in floating point:",
    "compare": "compare with floating point:",
}
ENDINGS = (".html", ".json")  # of reports


@dataclass(frozen=True)
class Batches:
    """Calibration data as pairs of inputs and no label; `count` is the model's number of inputs."""

    items: Iterable[Any]
    count: int

    def __iter__(self) -> Iterator[Any]:
        """Yield keyword arguments, or positional ones beside None."""
        from ipex_inductor.quantization.tuning import read_inputs

        for item in self.items:
            args, kwargs = read_inputs(item, self.count)
            yield kwargs or (args, None)


class ObserverName(StrEnum):
    """Observers of the ranges of activations."""

    HISTOGRAM = "histogram"
    PERCENTILE = "percentile"
    MIN_MAX = "min_max"
    MOVING_AVERAGE = "moving_average"


def quantize(
    model: Target,
    data: Annotated[
        str,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="Returns calibration data: items are inputs, or pairs of inputs and labels.",
        ),
    ],
    accuracy: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="Takes a model and returns its accuracy. Default: outputs are compared.",
        ),
    ] = None,
    budget_accuracy: Annotated[
        float, typer.Option(min=0, help="Largest drop of the accuracy.")
    ] = 0.01,
    observer: Annotated[
        list[ObserverName] | None,
        typer.Option(help="Observer to try; repeat it for several. Default: three of them."),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Samples to calibrate with.")] = 100,
    output: Annotated[
        Path | None,
        typer.Option(help="Write the model to this file (.safetensors), and a JSON file beside."),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(help="Write the report, also with the time of kernels: FILE.html or .json."),
    ] = None,
    batch: Batch = 1,
    as_json: AsJson = False,
) -> None:
    """Quantize a model to INT8; leave layers in floating point until the accuracy is in budget.

    FUNCTION returns (model, tuple of example inputs); the current directory is importable.
    """
    _check_files(output, report)
    module, inputs = load_model(model, None, batch, Device.CPU)
    items = Batches(_load_data(data), len(inputs))
    score = None if accuracy is None else _numeric(accuracy, find_user(accuracy))

    from ipex_inductor.inspection.quantization_report import report_layers
    from ipex_inductor.quantization import autotune, convert, save
    from ipex_inductor.quantization.files.summary_file import write_whole
    from ipex_inductor.quantization.tuning import OBSERVERS

    with _progress() as step:
        tuned = autotune(
            module,
            items,
            eval_func=score,
            sampling_sizes=[samples],
            accuracy_criterion={"absolute": budget_accuracy},
            step=step,
            observers=[str(name) for name in observer] if observer else OBSERVERS,
        )
        quantized = convert(tuned)
        layers = report_layers(
            quantized,
            items,
            with_kernel_times=report is not None,
            step=lambda batches: step("compare", f"batch {batches}", batches - 1, batches),
        )
    if output is not None:
        save(quantized, output)
    if report is not None:
        text = layers.to_html() if report.suffix == ".html" else layers.to_json()
        write_whole(report, text.encode())
    _print_results(layers, vars(tuned), budget_accuracy, as_json)


def _check_files(output: Path | None, report: Path | None) -> None:
    """Raise `OptionError` for files that cannot be written, before the work is done."""
    for name, file in (("--output", output), ("--report", report)):
        if file is not None and not file.parent.is_dir():
            expected = f"{name} in a folder that exists"
            raise OptionError(expected, str(file), "Make the folder first.")
    if report is not None and report.suffix not in ENDINGS:
        raise OptionError("--report FILE.html or FILE.json", str(report), "Name such a file.")
    if report is not None and output is not None and report == _description(output):
        advice = "The JSON file of the model has this name; name another one."
        raise OptionError("--report beside the model's own files", str(report), advice)


def _description(output: Path) -> Path:
    """Return the JSON file that belongs to a model's file."""
    is_full = output.suffix == ".safetensors"
    return output.with_suffix(".json") if is_full else output.with_name(f"{output.name}.json")


def _load_data(name: str) -> Iterable[Any]:
    """Return the items of a user's MODULE:FUNCTION, which can be read more than once."""
    import torch

    items = call_user(name)
    if isinstance(items, torch.Tensor):
        return [items]
    if not isinstance(items, Iterable) or isinstance(items, (str, dict)):
        expected = f"{name} to return a data loader, or a list of inputs"
        raise OptionError(expected, type(items).__name__, "Return [inputs, ...].")
    return list(items) if isinstance(items, Iterator) else items


def _numeric(
    name: str, function: Callable[["torch.nn.Module"], Any]
) -> Callable[["torch.nn.Module"], float]:
    """Return an accuracy function that raises `OptionError` if the result is no number."""

    import torch

    def evaluate(model: "torch.nn.Module") -> float:
        with torch.no_grad():
            value = function(model)
        try:
            accuracy = float(value)
        except (TypeError, ValueError, RuntimeError):
            accuracy = math.nan
        if not math.isfinite(accuracy):
            raise OptionError(f"{name} to return a number", repr(value), "Return the accuracy.")
        return accuracy

    return evaluate


@contextmanager
def _progress() -> "Iterator[Step]":
    """Show a bar on stderr, or lines where that is no terminal; yield what advances them."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda kind, subject, finished, count: _print_step(kind, subject, finished, count)
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.description}"), console=console) as progress:
        task = progress.add_task("", total=None)

        def advance(kind: str, subject: str, finished: int, count: int) -> None:
            description = f"{KINDS[kind]} {subject}"[:60].replace("[", "\\[")
            progress.update(task, description=description, completed=finished, total=count)

        yield advance


def _print_step(kind: str, subject: str, finished: int, count: int) -> None:
    """Print a line on stderr; one for the sensitivity of all layers, none for each batch."""
    if kind == "sensitivity":
        subject = f"{count} layers" if not finished else ""
    if subject and kind != "compare":
        typer.echo(f"{KINDS[kind]} {subject}", err=True)


def _print_results(
    layers: "QuantizationReport", tuned: dict[str, Any], budget: float, as_json: bool
) -> None:
    """Print the table and the accuracy, or both as JSON."""
    trial, baseline = tuned["trials"][-1], tuned["baseline"]
    if as_json:
        facts = {
            "recipe": trial.recipe,
            "floating": list(trial.floating),
            "accuracy": trial.score,
            "baseline": baseline,
            "budget": budget,
        }
        typer.echo(json.dumps(layers.to_dict() | facts, indent=2))
        return
    show(Console(), layers, "")
    drop = f"{baseline - trial.score:.4g} of a budget of {budget:g}"
    show(Console(), f"accuracy {trial.score:.6g}, floating point {baseline:.6g}: drop {drop}")
    floating = f"; in floating point: {', '.join(trial.floating)}" if trial.floating else ""
    show(Console(), f"recipe: {trial.recipe}{floating}")
