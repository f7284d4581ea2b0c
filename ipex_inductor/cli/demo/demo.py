"""`ipex-inductor demo`: eager, Inductor and ipex side by side on whole models, checked first."""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from ipex_inductor.cli.demo.models import (
    CONTESTANTS,
    MODELS,
    Contestant,
    Device,
    Dtype,
    Job,
    check_name,
    title,
)
from ipex_inductor.errors import IpexError, OptionError
from ipex_inductor.reporting import listing

DEFAULT, QUICK = ("resnet50", "bert"), ("resnet50",)
YARDSTICK = "inductor"
BUSY = 0.05  # share of the processors; colliding OpenMP teams slow a model tenfold
LOG_TAIL = 20  # lines of a failed child's stderr


class ChildError(IpexError, RuntimeError):
    """Error for a measuring process that died; `tail` is the end of its stderr."""

    def __init__(self, code: int, tail: str) -> None:
        super().__init__("a measuring process that ends well", f"exit code {code}", tail)
        self.tail = tail


@dataclass(frozen=True)
class Row:
    """Facts about one contestant; the times are set only if `status` is "ok"."""

    name: str
    title: str
    status: str  # "ok", "wrong" (fails the check against fp64) or "failed" (raised)
    reason: str = ""
    error: float | None = None
    limit: float | None = None
    median_ms: float | None = None
    min_ms: float | None = None
    calls: int = 0
    vs_inductor: float | None = None
    vs_eager: float | None = None
    cold_s: float | None = None
    warm_s: float | None = None
    fx_hits: int = 0
    aot_hits: int = 0
    rules: Mapping[str, int] = field(default_factory=dict)  # of ipex: how often each fired
    fallbacks: list[str] = field(default_factory=list)  # graphs that plain Inductor compiled


@dataclass(frozen=True)
class Report:
    """Rows of one model, and where they were measured."""

    model: str
    title: str
    dtype: str
    inputs: list[str]
    rows: list[Row]
    machine: Mapping[str, Any]
    once: Mapping[str, float]  # seconds that any process spends before its first contestant
    took_s: Mapping[str, float]  # by step
    other_load: float | None = None  # share of the processors that others used during the timing


def demo(
    model: Annotated[
        list[str] | None,
        typer.Option(help=f"{', '.join(MODELS)} or MODULE:FUNCTION; may be repeated."),
    ] = None,
    dtype: Annotated[
        Dtype | None,
        typer.Option(help="Of weights and inputs. Default: bf16, fp32 where oneDNN has no bf16."),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Batch size of the named models.")] = 1,
    device: Annotated[
        Device | None, typer.Option(help="Default: cuda where torch has it, else cpu.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0, help="Timing of each model.")] = 10.0,
    quick: Annotated[bool, typer.Option("--quick", help="ResNet-50 alone: two minutes.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The facts as JSON on stdout.")] = False,
) -> None:
    """Compare eager, Inductor and ipex: speed, first call, caches, and error against fp64.

    FUNCTION returns (model, tuple of example inputs); the current directory is importable.
    """
    names = model or (QUICK if quick else DEFAULT)
    for name in names:
        check_name(name)
    with tempfile.TemporaryDirectory(prefix="ipex-demo-", ignore_cleanup_errors=True) as folder:
        root, scratch = Path(folder), Path(folder, "scratch")
        scratch.mkdir()
        cast_dtype = dtype or usual_dtype(device)
        job = Job("", "", cast_dtype, batch, device, (), root, scratch, seconds)
        reports = run(names, job)
    command = repeat_command(names, job, reports[0].machine["device"])
    if as_json:
        facts = {"schema": 1, "command": command, "models": [asdict(r) for r in reports]}
        typer.echo(json.dumps(facts, indent=2))
    else:
        show(reports, command, Console())
    raise typer.Exit(exit_code(reports))


def usual_dtype(device: Device | None) -> Dtype:
    """Return the default dtype of `device`: bf16, or fp32 on a CPU without bf16 instructions."""
    import torch

    from ipex_inductor.cli.demo.measure import default_device

    if (device or default_device()) != Device.CPU or torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return Dtype.BF16
    hint = "In fp32: oneDNN has no bf16 on this processor (--dtype bf16 asks for it all the same)."
    Console(stderr=True).print(hint, style="dim")
    return Dtype.FP32


def run(names: tuple[str, ...] | list[str], job: Job) -> list[Report]:
    """Measure each model in turn, with a progress bar on stderr."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
        # Each compiling contestant has a cold and a warm step; then load, eager, check and timing.
        task = bar.add_task("", total=len(names) * (2 * len(CONTESTANTS) + 2))
        reports = []
        for number, name in enumerate(names):

            def step(text: str, name: str = name) -> None:
                bar.update(task, advance=1, description=f"{title(name)}: {text}")

            folder = job.folder / str(number)
            reports.append(run_model(replace(job, model=name, folder=folder), step))
        return reports


def run_model(job: Job, step: Callable[[str], None]) -> Report:
    """Return the report of one model.

    Each compiling contestant has a cold process of its own; then one process measures all of them.
    """
    times: dict[str, float] = {}
    job.folder.mkdir()

    def start_step(text: str) -> None:
        times[text] = time.monotonic()
        step(text)

    colds: dict[str, dict[str, Any]] = {}
    for contestant in CONTESTANTS[1:]:
        start_step(f"cold {contestant.title}")
        colds[contestant.name] = cold(replace(job, task="cold", contestants=(contestant,)), step)
    # ipex runs first, so that remaining once-per-process costs count against it.
    alive = tuple(c for c in reversed(CONTESTANTS) if "failed" not in colds.get(c.name, {}))
    result = run_child(replace(job, task="measure", contestants=alive), start_step)
    fresh = next(iter(colds.values())).get("start_s", 0.0)
    ends = [*list(times.values())[1:], time.monotonic()]
    return Report(
        job.model,
        title(job.model),
        job.dtype,
        result["inputs"],
        merge(colds, result["rows"]),
        result["machine"],
        {"import_s": result["import_s"], "start_s": result["start_s"], "fresh_start_s": fresh},
        {
            text: round(end - begin, 1)
            for (text, begin), end in zip(times.items(), ends, strict=True)
        },
        result["other_load"],
    )


def cold(job: Job, step: Callable[[str], None]) -> dict[str, Any]:
    """Return the facts of one cold child process; a child that died is a fact too."""
    try:
        return run_child(job, step)
    except ChildError as error:
        Console(stderr=True).print(error.tail, style="dim", markup=False, highlight=False)
        return {"failed": error.came}


def run_child(job: Job, step: Callable[[str], None]) -> dict[str, Any]:
    """Run one job in a fresh process and return its result."""
    log = job.folder / f"{job.task}.log"
    command = [sys.executable, "-m", "ipex_inductor.cli.demo.measure", job.to_json()]
    with log.open("wb") as stderr:
        child = subprocess.Popen(
            command,
            # Inductor keeps precompiled headers in TMPDIR, whatever its cache folder is.
            env={**os.environ, "TMPDIR": str(job.scratch)},
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            start_new_session=True,
        )
        try:
            message = _last_message(child, step)
            code = 0 if message else child.wait()
        finally:
            # The group includes compile workers, which would write into a removed folder.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    if "error" in message:
        raise OptionError(*message["error"])
    if not message:
        raise ChildError(code, "\n".join(log.read_text(errors="replace").splitlines()[-LOG_TAIL:]))
    result: dict[str, Any] = message["result"]
    return result


def merge(
    colds: Mapping[str, Mapping[str, Any]], measured: Mapping[str, Mapping[str, Any]]
) -> list[Row]:
    """Return one row per contestant, with ratios; a row that is not "ok" has no times."""
    rows = [row_of(c, colds.get(c.name, {}), measured.get(c.name, {})) for c in CONTESTANTS]
    best = {row.name: row.min_ms for row in rows}
    return [
        replace(
            row,
            vs_inductor=_ratio(best[YARDSTICK], row.min_ms),
            vs_eager=_ratio(best["eager"], row.min_ms),
        )
        for row in rows
    ]


def row_of(contestant: Contestant, cold: Mapping[str, Any], warm: Mapping[str, Any]) -> Row:
    """Return the row of one contestant.

    Args:
        contestant: the contestant.
        cold: the facts of its cold process.
        warm: the facts of the measuring process.
    """
    row = Row(contestant.name, contestant.title, "failed")
    reason = cold.get("failed") or warm.get("failed")
    if reason or "correct" not in warm:
        return replace(row, reason=reason or "not checked: eager itself failed")
    row = replace(
        row,
        error=warm["error"],
        limit=warm["limit"],
        rules=cold.get("rules", {}),
        fallbacks=cold.get("fallbacks", []),
    )
    if not warm["correct"]:
        return replace(row, status="wrong", reason="fails the check against fp64")
    return replace(
        row,
        status="ok",
        cold_s=cold.get("seconds"),
        warm_s=warm["seconds"] if contestant.backend else None,
        **{key: warm[key] for key in ("median_ms", "min_ms", "calls", "fx_hits", "aot_hits")},
    )


def exit_code(reports: list[Report]) -> int:
    """Return 1 if a result is wrong, or if ipex or eager failed; a failed rival does not count."""
    rows = [row for report in reports for row in report.rows]
    bad = any(
        row.status == "wrong" or (row.status == "failed" and row.name in ("ipex", "eager"))
        for row in rows
    )
    return int(bad)


def repeat_command(names: tuple[str, ...] | list[str], job: Job, device: str) -> str:
    """Return the command line that repeats the measurement, with defaults spelled out."""
    args = ["ipex-inductor", "demo", *(arg for name in names for arg in ("--model", name))]
    args += ["--dtype", job.dtype, "--batch", str(job.batch)]
    args += ["--device", device, "--seconds", f"{job.seconds:g}"]
    threads = os.environ.get("OMP_NUM_THREADS")
    return (f"OMP_NUM_THREADS={threads} " if threads else "") + shlex.join(args)


def show(reports: list[Report], command: str, console: Console) -> None:
    """Print a table per model, the machine, and how to repeat the measurement."""
    for report in reports:
        listing.show(console, table(report))
        for row in report.rows:
            listing.show(console, *remarks(row))
        if (report.other_load or 0) > BUSY:
            busy = f"Other programs used {report.other_load:.0%} of the processors meanwhile: "
            console.print(Text(f"{busy}do not trust these speeds, measure again alone.", "red"))
        console.print()
    for note in footer(reports, command):
        console.print(Text(note, style="dim"), soft_wrap=True)


HEADS = (
    "median\nms",
    "min\nms",
    "vs\nInductor",
    "vs\neager",
    "error",
    "cold\ns",
    "warm\ns",
    "cache\nhits",
)


def table(report: Report) -> listing.Listing:
    """Return the comparison on one model as a table that fits 80 columns."""
    name = f"{report.title}, {report.dtype}, input {', '.join(report.inputs)}"
    shown = listing.Listing("", *map(listing.number, HEADS), title=name)
    for row in report.rows:
        style = "bold" if row.name == "ipex" else ""
        shown.add_row(*(Text.assemble(cell, style=style) for cell in cells(row)))
    return shown


def cells(row: Row) -> list[Text | str]:
    """Return the cells of one row of the table."""
    if row.status == "failed":
        return [row.title, Text("failed", "yellow")]
    if row.status == "wrong":
        error = Text("not finite" if row.error is None else f"{row.error:.1e}", "red")
        return [row.title, Text("wrong", "red"), "", "", "", error]
    hits = f"{row.fx_hits}/{row.aot_hits}" if row.cold_s is not None else ""
    numbers = (_number(row.median_ms), _number(row.min_ms))
    ratios = (_number(row.vs_inductor, "x"), _number(row.vs_eager, "x"))
    times = (_number(row.cold_s), _number(row.warm_s))
    return [row.title, *numbers, *ratios, f"{row.error:.1e}", *times, hits]


def remarks(row: Row) -> list[Text]:
    """Return the lines below the table: why a row has no times, and what ipex fused."""
    lines = []
    if row.status == "failed":
        lines.append(Text(f"{row.title}: {row.reason}", "yellow"))
    if row.status == "wrong":
        limit = "" if row.limit is None else f" (limit {row.limit:.1e})"
        lines.append(Text(f"{row.title}: {row.reason}{limit}; its speed is not shown", "red"))
    lines += [Text(f"{row.title} fell back to {what}", "yellow") for what in row.fallbacks]
    if row.rules:
        fused = ", ".join(f"{name} x{n}" for name, n in row.rules.items())
        lines.append(Text(f"{row.title} fused: {fused}"))
    return lines


def footer(reports: list[Report], command: str) -> list[str]:
    """Return notes on the machine, the columns, and the command that repeats the measurement."""
    facts, once = reports[0].machine, reports[0].once
    versions = f"torch {facts['torch']}, ipex_inductor {facts['ipex_inductor']}"
    return [
        f"{versions}; {facts['device']}: {facts['chip']}, {facts['threads']} threads",
        "vs: ratio of the minima, more is faster. error: relative RMSE against fp64. "
        "cold: first call with empty caches; warm: in the next process, with its hits in the "
        "FX graph and AOT autograd caches.",
        "Neither counts what any torch.compile pays once a process: "
        f"{once['import_s'] + once['start_s']:.1f} s to import and start the compiler "
        f"({once['import_s'] + once['fresh_start_s']:.1f} s the first time on a machine).",
        f"Repeat: {command}",
    ]


def _last_message(child: "subprocess.Popen[str]", step: Callable[[str], None]) -> dict[str, Any]:
    """Return the child's result or error; empty if it ended without one."""
    assert child.stdout is not None
    for line in child.stdout:
        message: dict[str, Any] = json.loads(line)
        if "step" not in message:
            return message
        step(message["step"])
    return {}


def _ratio(reference: float | None, value: float | None) -> float | None:
    return reference / value if reference is not None and value is not None else None


def _number(value: float | None, unit: str = "") -> str:
    return "" if value is None else f"{value:.2f}{unit}" if value < 100 else f"{value:.0f}{unit}"
