"""Generate the pages of results from `benchmarks/results/*.jsonl`."""

import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pages import RESULTS, ROOT, ROWS_SHOWN, RUNS_SHOWN, described, rows_of, table

# Fields that name a run rather than a measurement; they stand above its table.
RUN = (
    "date",
    "device",
    "gpu",
    "cpu",
    "arch",
    "flags",
    "threads",
    "torch",
    "triton",
    "cudnn",
    "torchvision",
    "transformers",
)
RUN += (
    "python",
    "driver",
    "intel-sycl-rt",
    "triton-xpu",
    "compiler",
    "commit",
    "sources",
    "command",
)
BASE = ("eager", "inductor", "max-autotune")
SHOWN = {"inductor": "Inductor", "ours": "ipex", "tuned": "ipex, tuned", "ipex28-trace": "IPEX 2.8"}
NOTE = """Generated from `benchmarks/results/{file}` in the repository, which has every row.
Older rows may name a benchmark by its former path; `python -m benchmarks` lists today's names.
Figures hold for the device, versions and date beside them, and for no other."""


def pages() -> dict[str, str]:
    """Return the text of each page of results by its path in docs/."""
    files = sorted(RESULTS.glob("*.jsonl"))
    return {
        "results/index.md": index(files),
        "results/inference-cpu.md": cpu(),
        "results/inference-gpu.md": inference_gpu(),
        "results/untuned-gpu.md": untuned_gpu(),
        "results/training-gpu.md": training(),
        "results/optimizers.md": optimizers(),
        "results/whole-models.md": zoo(),
        **{f"results/files/{path.stem}.md": file_page(path) for path in files},
    }


def index(files: Iterable[Path]) -> str:
    """Return the list of all pages of results."""
    rows = []
    for path in files:
        found = rows_of(path)
        dates = sorted({str(row["date"]) for row in found if "date" in row})
        span = dates[0] if len(set(dates)) == 1 else f"{dates[0]} to {dates[-1]}" if dates else ""
        rows.append((f"[{path.stem}](files/{path.stem}.md)", title(path), len(found), span))
    return f"""# Results

Every figure below is generated from rows in `benchmarks/results/`. Nothing is typed by hand. Each table names device, versions, date and command.

| page | compares |
|---|---|
| [Inference on CPUs](inference-cpu.md) | whole models: ipex, Inductor, IPEX 2.8 |
| [Inference on NVIDIA GPUs](inference-gpu.md) | whole models: eager, Inductor, ipex |
| [Models that nothing was tuned for](untuned-gpu.md) | whole models on a GPU without records of their own: eager, Inductor, ipex |
| [Training on NVIDIA GPUs](training-gpu.md) | training steps: eager, Inductor, ipex |
| [Optimizer steps](optimizers.md) | fused steps, torch's and ipex's |
| [Small whole models](whole-models.md) | the zoo of 43 models of seven families |

Repeat any of them on your machine: `python -m benchmarks` lists the benchmarks, `python -m benchmarks NAME --help` their options.
Times depend on clocks, other work and versions. Compare only rows of one run.

## All files

{table(("file", "what it measures", "rows", "dates"), rows, right=2)}
"""


def title(path: Path) -> str:
    """Return one line that says what a file of results measures."""
    named = {p.stem: p for p in (ROOT / "benchmarks").rglob("*.py") if p.stem != "__init__"}
    script = path.stem.removesuffix("_cpu") if path.stem not in named else path.stem
    other = {
        "ops_conv": "conv",
        "ops_linear": "linear",
        "attention_gpu": "attention",
        "cold_start": "cold",
        "other_tritons": "other_tritons",
    }
    script = other.get(path.stem, script)
    return described(named[script]) if script in named else path.stem.replace("_", " ")


def cpu() -> str:
    """Return whole models on CPUs, the last run of each."""
    rows = rows_of(RESULTS / "cpu.jsonl")
    groups: dict[tuple[str, ...], dict[tuple[str, ...], list[dict[str, Any]]]] = {}
    for row in rows:
        # Rows of one run may name two torches: IPEX 2.8 runs with its own.
        run = tuple(str(row.get(k, "")) for k in ("date", "cpu", "threads", "command", "commit"))
        what = (
            str(row.get("cpu", "")) + " " + _isa(row.get("flags", "")),
            row["model"],
            row["dtype"],
            str(row["batch"]),
        )
        groups.setdefault(what, {}).setdefault(run, []).append(row)
    return _whole(
        "Inference on CPUs",
        "cpu.jsonl",
        "Least milliseconds of a call, of interleaved rounds. Results were compared with a float64 run before timing.",
        groups,
        ("cpu", "model", "dtype", "batch"),
        lambda row: row.get("min_ms"),
        ours="ipex",
    )


def _isa(flags: str) -> str:
    have = set(flags.split())
    return next(
        (name for name in ("amx_tile", "amx", "avx512_bf16", "avx512f", "avx2") if name in have), ""
    )


def inference_gpu() -> str:
    """Return whole models on GPUs, the last run of each."""
    groups: dict[tuple[str, ...], dict[tuple[str, ...], list[dict[str, Any]]]] = {}
    for file in ("vision.jsonl", "nlp.jsonl"):
        for row in rows_of(RESULTS / file):
            run = tuple(
                str(row.get(k, ""))
                for k in ("date", "device", "torch", "command", "sources", "commit")
            )
            what = (row["device"], row["model"], str(row["batch"]))
            groups.setdefault(what, {}).setdefault(run, []).append(row)
    return _whole(
        "Inference on NVIDIA GPUs",
        "vision.jsonl` and `nlp.jsonl",
        "Median milliseconds of a call. `ipex, tuned` is measured after timing kernels for that model; `ipex` uses the records that it has.",
        groups,
        ("device", "model", "batch"),
        lambda row: row.get("median, ms"),
        ours="ours",
    )


def untuned_gpu() -> str:
    """Return whole models on GPUs that no record was made for, the last run of each."""
    groups: dict[tuple[str, ...], dict[tuple[str, ...], list[dict[str, Any]]]] = {}
    for row in rows_of(RESULTS / "zoo_gpu.jsonl"):
        run = tuple(str(row.get(k, "")) for k in ("date", "device", "torch", "command", "sources"))
        what = (row["device"], row["model"], row["dtype"], str(row["batch"]))
        groups.setdefault(what, {}).setdefault(run, []).append(row)
    return _whole(
        "Models that nothing was tuned for",
        "zoo_gpu.jsonl",
        "Median milliseconds of the device, each peer in its default mode and replayed as a CUDA graph.",
        groups,
        ("device", "model", "dtype", "batch"),
        lambda row: row.get("device, ms"),
        ours="ours",
    )


def training() -> str:
    """Return training steps on GPUs, the last run of each."""
    groups: dict[tuple[str, ...], dict[tuple[str, ...], list[dict[str, Any]]]] = {}
    for row in rows_of(RESULTS / "train.jsonl"):
        run = tuple(
            str(row.get(k, "")) for k in ("date", "device", "torch", "command", "sources", "commit")
        )
        what = (row["device"], row["model"], "x".join(map(str, row["shape"])))
        groups.setdefault(what, {}).setdefault(run, []).append(row)
    return _whole(
        "Training on NVIDIA GPUs",
        "train.jsonl",
        "Median milliseconds of a whole step: forward, backward and optimizer.",
        groups,
        ("device", "model", "shape"),
        lambda row: row.get("median, ms"),
        ours="ours",
    )


def _whole(
    heading: str,
    file: str,
    unit: str,
    groups: dict[tuple[str, ...], dict[tuple[str, ...], list[dict[str, Any]]]],
    names: tuple[str, ...],
    time: Any,
    ours: str,
) -> str:
    """Return a table of the last run of each model that has ours beside another backend.

    Args:
        heading: title of the page.
        file: file of results.
        unit: the sentence that says what the figures are.
        groups: rows by model and run, in order.
        names: columns that name a model; the first is the device.
        time: function of a row that returns its time, or None.
        ours: name of this backend in the rows.
    """
    shown, peers = [], set()
    for what, runs in groups.items():
        for run, rows in reversed(runs.items()):
            times = {row["peer"]: t for row in rows if (t := time(row))}
            times = {p: t for p, t in times.items() if p in (*BASE, "ipex28-trace", ours, "tuned")}
            others = {p: t for p, t in times.items() if not _ours(p, ours)}
            mine = {p: t for p, t in times.items() if _ours(p, ours)}
            if mine and others.keys() - {"eager"}:
                shown.append(
                    (
                        what,
                        run,
                        times,
                        min(v for p, v in others.items() if p != "eager") / min(mine.values()),
                        rows,
                    )
                )
                peers |= times.keys()
                break
    order = [p for p in (*BASE, "ipex28-trace", ours, "tuned") if p in peers]
    parts = [
        f"# {heading}",
        NOTE.format(file=file),
        unit
        + " The ratio is the time of the best other compiler over that of ipex: above 1, ipex is faster.",
    ]
    for device in sorted({what[0] for what, *_ in shown}):
        mine = [row for row in shown if row[0][0] == device]
        used = [p for p in order if any(p in times for _, _, times, *_ in mine)]
        commands = list(dict.fromkeys(_run(rows, ours) for *_, rows in mine))
        body = [
            (
                *what[1:],
                *(_number(times[p]) if p in times else "" for p in used),
                f"{ratio:.2f}",
                f"[{commands.index(_run(rows, ours)) + 1}](#runs-{_slug(device)})",
            )
            for what, _, times, ratio, rows in sorted(mine, key=lambda r: r[0])
        ]
        mean = statistics.geometric_mean(ratio for _, _, _, ratio, _ in mine)
        parts += [
            f"## {device}",
            f"{len(mine)} models and batches; geometric mean of the ratio: {mean:.2f}.",
            table(
                (*names[1:], *(SHOWN.get(p, p) for p in used), "ratio", "run"),
                body,
                right=len(names) - 1,
            ),
            f"### Runs {{#runs-{_slug(device)}}}",
            table(
                ("run", "date", "versions", "command"),
                ((i, *c[:2], f"`{c[2]}`") for i, c in enumerate(commands, 1)),
            ),
        ]
    return "\n\n".join(parts) + "\n"


def _ours(peer: str, ours: str) -> bool:
    return peer in (ours, "tuned")


def _run(rows: list[dict[str, Any]], ours: str) -> tuple[str, str, str]:
    row = next(row for row in rows if _ours(row["peer"], ours))
    return row["date"], _versions(row), row["command"]


def _number(value: float) -> str:
    """Return three digits of a figure, without an exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _slug(text: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in text.lower()).strip("-")


def _versions(row: dict[str, Any]) -> str:
    keys = ("torch", "triton", "torchvision", "transformers", "cudnn", "threads")
    return ", ".join(f"{k} {row[k]}" for k in keys if row.get(k) not in (None, "", "None"))


def optimizers() -> str:
    """Return optimizer steps on CPUs and GPUs, the last run of each form."""
    parts = ["# Optimizer steps", NOTE.format(file="optimizer.jsonl` and `optimizer_gpu.jsonl")]
    for file, field, heading in (
        ("optimizer.jsonl", "median and minimum, ms", "On CPUs: median milliseconds of a step"),
        (
            "optimizer_gpu.jsonl",
            "device and host, ms",
            "On NVIDIA GPUs: milliseconds of the device",
        ),
    ):
        last: dict[tuple[str, ...], dict[str, Any]] = {}
        for row in rows_of(RESULTS / file):
            if isinstance(row.get(field), dict) and "optimizer" in row:
                last[
                    tuple(
                        str(row.get(k, "")) for k in ("device", "parameters", "optimizer", "form")
                    )
                ] = row
        peers = list(dict.fromkeys(p for row in last.values() for p in row[field]))
        body = [
            (
                *what,
                *(_number(row[field][p][0]) if row[field].get(p) else "" for p in peers),
                row["date"],
                row["torch"],
                f"`{row['command']}`",
            )
            for what, row in sorted(last.items())
        ]
        parts += [
            f"## {heading}",
            table(
                ("device", "parameters", "optimizer", "form", *peers, "date", "torch", "command"),
                body,
            ),
        ]
    return "\n\n".join(parts) + "\n"


def zoo() -> str:
    """Return the zoo of small models, the last row of each case."""
    last: dict[tuple[str, ...], dict[str, Any]] = {}
    for row in rows_of(RESULTS / "zoo.jsonl"):
        if row.get("ratio"):
            key = (
                row["device"],
                row["family"],
                row["model"],
                row["dtype"],
                "training" if row["training"] else "inference",
                "dynamic" if row["dynamic"] else "static",
            )
            last[key] = row
    parts = [
        "# Small whole models",
        NOTE.format(file="zoo.jsonl"),
        "Milliseconds of a call; the ratio is Inductor's time over that of ipex. Every case was compared with eager first.",
    ]
    for device in sorted({key[0] for key in last}):
        mine = {key: row for key, row in last.items() if key[0] == device}
        body = [
            (
                *key[1:],
                _number(row["inductor, ms"]),
                _number(row["ipex, ms"]),
                f"{row['ratio']:.2f}",
                row["date"],
                row["torch"],
            )
            for key, row in sorted(mine.items())
        ]
        mean = statistics.geometric_mean(row["ratio"] for row in mine.values())
        commands = "\n".join(f"- `{c}`" for c in sorted({row["command"] for row in mine.values()}))
        parts += [
            f"## {device}",
            f"{len(mine)} cases; geometric mean of the ratio: {mean:.2f}.",
            table(
                (
                    "family",
                    "model",
                    "dtype",
                    "graph",
                    "sizes",
                    "Inductor, ms",
                    "ipex, ms",
                    "ratio",
                    "date",
                    "torch",
                ),
                body,
            ),
            f"Commands:\n\n{commands}",
        ]
    return "\n\n".join(parts) + "\n"


def file_page(path: Path) -> str:
    """Return a page with the latest runs of one file of results."""
    runs: dict[tuple[tuple[str, str], ...], list[dict[str, Any]]] = {}
    run: tuple[tuple[str, str], ...] = ()
    for row in rows_of(path):
        flat = dict(_flatten(row))
        named = tuple((k, str(flat[k])) for k in RUN if flat.get(k) not in (None, "", "None"))
        run = named or run  # rows of some files follow a head with the run's facts
        if rest := {k: v for k, v in flat.items() if k not in RUN}:
            runs.setdefault(run, []).append(rest)
    parts = [f"# {path.stem}", title(path), NOTE.format(file=path.name)]
    shown = list(runs.items())[-RUNS_SHOWN:]
    if len(runs) > len(shown):
        parts.append(f"The latest {len(shown)} of {len(runs)} runs:")
    for facts, rows in reversed(shown):
        known = dict(facts)
        parts.append(
            f"## {known.get('date', 'undated')}, {known.get('device') or known.get('arch') or known.get('gpu') or known.get('cpu') or known.get('compiler') or 'device unnamed'}"
        )
        parts.append("\n".join(f"- {k}: `{v}`" for k, v in facts if k != "date"))
        columns = list(dict.fromkeys(k for row in rows for k in row))[:16]
        parts.append(
            table(columns, ([_short(row.get(c, "")) for c in columns] for row in rows[:ROWS_SHOWN]))
        )
        if len(rows) > ROWS_SHOWN:
            parts.append(f"{len(rows) - ROWS_SHOWN} more rows of this run are in the file.")
    return "\n\n".join(parts) + "\n"


def _flatten(value: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, inner in value.items():
        if isinstance(inner, dict) and len(prefix) < 40:
            yield from _flatten(inner, f"{prefix}{key}: ")
        else:
            yield f"{prefix}{key}", inner


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        value = ", ".join(_short(v) for v in value)
    text = str(value)
    text = text if len(text) <= 90 else text[:87] + "..."
    return f"`{text}`" if any(c in text for c in "*_<>[]{}") else text
