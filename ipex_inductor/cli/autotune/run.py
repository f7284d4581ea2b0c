"""`ipex-inductor autotune run`: measure the kernel choices of a model or of a list of problems."""

from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from ipex_inductor.autotune.child import Tuned
from ipex_inductor.autotune.comparison import words
from ipex_inductor.autotune.own import default_folder
from ipex_inductor.autotune.record import Problem, encode
from ipex_inductor.autotune.select import Selection, lookup
from ipex_inductor.cli.demo.models import MODELS, Device, Dtype
from ipex_inductor.cli.model_options import Batch, Mode, Precision, Where, load_model
from ipex_inductor.cli.shared import AsJson, say, say_json
from ipex_inductor.errors import ArgumentError, DeviceError
from ipex_inductor.reporting.listing import Listing, number


class Engine(StrEnum):
    """Places where problems are measured: this machine or a Ray cluster."""

    LOCAL = "local"
    RAY = "ray"


STOPPED = 130  # the exit code of shells for a process that Ctrl-C ended


def autotune_run(
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help=f"{', '.join(MODELS)} or MODULE:FUNCTION."),
    ] = None,
    shapes: Annotated[
        Path | None, typer.Option(help="A file of problems, a line each (docs/guides/autotune.md).")
    ] = None,
    into: Annotated[
        Path | None, typer.Option(help="The database, a folder. Default: our own.")
    ] = None,
    arch: Annotated[
        str | None, typer.Option(help="Refuse to measure on another target than this.")
    ] = None,
    budget: Annotated[float, typer.Option(min=0, help="Seconds in all.")] = 3600.0,
    again: Annotated[
        bool, typer.Option("--again", help="Measure what the database knows as well.")
    ] = False,
    train: Annotated[
        bool, typer.Option("--train", help="The model in train mode, its backward too.")
    ] = False,
    engine: Annotated[
        Engine, typer.Option(help="This machine, or the devices of a Ray cluster.")
    ] = Engine.LOCAL,
    address: Annotated[
        str | None, typer.Option(help="Of the Ray cluster. Default: this machine's.")
    ] = None,
    mode: Mode = None,
    dtype: Precision = None,
    batch: Batch = 1,
    device: Where = Device.CPU,
    as_json: AsJson = False,
) -> None:
    """Measure every choice of kernel, verified first, in a process of its own; keep the records.

    Ctrl-C keeps what was measured. Exit code 1 if something could not be measured.
    """
    if (model is None) == (shapes is None):
        actual = "neither" if model is None else "both"
        raise ArgumentError("a MODEL or --shapes FILE", actual, "Give one of the two.")
    machine = _target(device, arch)
    problems = (
        _from_file(shapes, machine, device)
        if shapes is not None
        else _from_model(str(model), mode, dtype, batch, device, train)
    )
    folder = into or default_folder()
    known_selections = {} if again else lookup([encode(p) for p in problems], folder)
    pending = [
        p for p in problems if not (s := known_selections.get(encode(p))) or not s.is_measured
    ]
    source = _source(pending, budget, engine, address, device)
    outcomes, stopped = _collect_outcomes(source, len(pending), folder)
    selections = lookup([encode(p) for p in problems], folder)
    reasons = {encode(p): outcome for p, outcome in outcomes if isinstance(outcome, str)}
    rows = [(p, selections.get(encode(p)), reasons.get(encode(p), "")) for p in problems]
    if as_json:
        say_json({"database": str(folder), "problems": list(map(_facts, rows))})
    else:
        _say(rows, folder, len(problems) - len(pending))
    if stopped:
        raise typer.Exit(STOPPED)
    if reasons:
        raise typer.Exit(1)


def _target(device: Device, arch: str | None) -> str:
    """Return this machine's target for `device`; raise `DeviceError` if it is not `arch`."""
    from ipex_inductor.target import device as target

    current = str(target.current(device.value))
    if arch is not None and current != str(target.find_target(arch)):
        raise DeviceError(
            f"target {arch}", current, "Run this on that device, or leave out --arch."
        )
    return current


def _from_file(file: Path, arch: str, device: Device) -> list[Problem]:
    """Return the distinct problems of a file; raise `ArgumentError` if it is not text."""
    from ipex_inductor.lowerings.problem import settings, shapes

    try:
        lines = file.read_text("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ArgumentError("a text file of problems", str(error), "Check the path.") from None
    read = shapes.problems(lines, arch, settings.settings_of(device.value), str(file))
    return list({encode(problem): problem for problem in read}.values())


def _from_model(
    name: str, mode: str | None, dtype: Dtype | None, batch: int, device: Device, train: bool
) -> list[Problem]:
    """Return the problems that compiling a model poses.

    Args:
        name: a named model or MODULE:FUNCTION.
        mode: the mode of torch.compile.
        dtype: the dtype of weights and inputs, None to leave them.
        batch: the batch size of the named models.
        device: the device to compile for.
        train: whether the model is in train mode, with its backward.
    """
    import torch

    from ipex_inductor.compiler.kernel_selection import problems_of

    module, inputs = load_model(name, dtype, batch, device)
    module.train(train)
    with torch.set_grad_enabled(train):
        return problems_of(lambda: module(*inputs), mode)


def _source(
    pending: Sequence[Problem], budget: float, engine: Engine, address: str | None, device: Device
) -> Iterator[Tuned]:
    """Return an iterator that measures the pending problems, here or on a Ray cluster.

    Args:
        pending: the problems to measure.
        budget: seconds in all.
        engine: this machine, or a Ray cluster.
        address: the address of the Ray cluster.
        device: the device of the problems; anything but a CPU takes one GPU per worker.
    """
    from ipex_inductor.autotune import fleet
    from ipex_inductor.lowerings.select.selection import COMMAND, tune_locally

    if engine is Engine.LOCAL:
        return tune_locally(pending, budget)
    gpus = int(device is not Device.CPU)
    return fleet.measure_problems(
        pending, budget, COMMAND, gpus=gpus, cpus=_threads(pending), address=address
    )


def _threads(problems: Sequence[Problem]) -> int:
    """Return the largest thread count of the problems' settings: each worker reserves as many."""
    counts = (p.settings.get("threads") for p in problems)
    return max((count for count in counts if isinstance(count, int)), default=1)


def _collect_outcomes(
    source: Iterable[Tuned], count: int, folder: Path
) -> tuple[list[Tuned], bool]:
    """Return the outcomes of all problems, and whether Ctrl-C stopped the run before the end."""
    from ipex_inductor.lowerings.select.selection import store_results

    done: list[Tuned] = []
    try:
        for outcome in _with_progress(store_results(source, folder), count):
            done.append(outcome)
    except KeyboardInterrupt:
        return done, True
    return done, False


def _with_progress(measured: Iterable[Tuned], count: int) -> Iterator[Tuned]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task("measuring", total=count)
        for problem, outcome in measured:
            progress.update(task, advance=1, description=words.problem(problem)[:60])
            yield problem, outcome


_Row = tuple[Problem, Selection | None, str]


def _say(rows: Sequence[_Row], folder: Path, known_count: int) -> None:
    """Print a table of the problems' choices and a summary line."""
    table = Listing("problem", "choice", number("us"), number("library's us"))
    for problem, selection, reason in rows:
        best = selection and selection.best
        library = selection and selection.library
        table.add_row(
            words.replace_unprintable(words.problem(problem)),
            words.replace_unprintable(
                words.choice(best.choice) if best else reason or "nothing runs"
            ),
            f"{best.p50:.4g}" if best else "",
            f"{library.p50:.4g}" if library else "",
        )
    unknown = sum(selection is None for _, selection, _ in rows)
    tail = f", {unknown} without a choice" if unknown else ""
    say(table, f"{len(rows)} problems, {known_count} known before{tail}: {folder}")


def _facts(row: _Row) -> dict[str, Any]:
    problem, selection, reason = row
    return {
        "problem": problem,
        "choice": selection and selection.choice,
        "microseconds": selection and selection.best.p50,
        "library_microseconds": selection and selection.library and selection.library.p50,
        "reason": reason,
    }
