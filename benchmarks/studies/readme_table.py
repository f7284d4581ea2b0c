"""Write the results table of README.md and its two plots from the rows in `results/`.

    python -m benchmarks readme_table [--check]

Each figure is a ratio of times, Inductor's best mode or IPEX 2.8 over backend `ipex`, both of one
run. A GPU's figure comes from the last run at batch 64 that has Inductor's max-autotune, and
compares medians in the default mode. A CPU's figure comes from the last run with two threads at
batch 1 and compares minima, as other load on the machine only adds time. `--check` writes nothing
and ends with status 1 if a file differs from what the rows give.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import geometric_mean
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from model_means import THEIRS, common_facts, fastest_row, group_by_model, select_run

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"

# The rows of the table: title, models of GPU results, models of CPU results, dtype.
MODELS = (
    ("ResNet-50", "resnet50", "resnet50", "bf16"),
    ("RegNetY-032", "timm:regnety_032", None, "bf16"),
    ("ConvNeXt-B", "timm:convnext_base", None, "bf16"),
    ("EfficientNet-B0", "timm:efficientnet_b0", None, "bf16"),
    ("DenseNet-121", "timm:densenet121", None, "bf16"),
    ("Inception-v3", "timm:inception_v3", None, "bf16"),
    ("U-Net", "unet", None, "bf16"),
    ("ViT-B/16", "timm:vit_base_patch16_224", "vit", "bf16"),
    ("Swin-B", "timm:swin_base_patch4_window7_224", None, "bf16"),
    ("BERT-base", "bert", "bert", "bf16"),
    ("T5-small encoder", "t5", None, "bf16"),
    ("GPT-2 prefill", "gpt2", None, "bf16"),
    ("GPT-2 decoding", None, "gpt2-decode", "bf16"),
    ("Llama prefill", "llama", None, "bf16"),
    ("Llama decoding", "llama-decode", None, "bf16"),
    ("ResNet-50", None, "resnet50", "fp32"),
    ("BERT-base", None, "bert", "fp32"),
)
PEERS = {"ours", "max-autotune"}  # a run without them says nothing about Inductor's best mode
GPU, BATCH, THREADS = "NVIDIA-H200", 64, 2
GPU_COMMAND = "python -m benchmarks vision --batch 64 --peers eager inductor ours max-autotune"
CPU_COMMAND = "python -m benchmarks cpu --peers inductor,ipex28-trace --threads 2"
# Each CPU column: its title, an instruction set its CPUs have, one they lack, and a remark.
CPUS = (
    ("CPU, AVX-512 bf16", "avx512_bf16", "amx_bf16", ""),
    ("CPU, AVX2", "avx2", "avx512f", "; IPEX 2.8 packs no bf16 weights there"),
    ("CPU, AMX", "amx_bf16", None, ""),
)


@dataclass(frozen=True)
class Ratio:
    """The speed of backend `ipex` for one model on one device, relative to its peers."""

    inductor: float
    ipex28: float | None
    date: str
    torch: str

    def __str__(self) -> str:
        """Return the cell of the table."""
        return f"{self.inductor:.2f}" + (f" ({self.ipex28:.2f})" if self.ipex28 else "")


@dataclass(frozen=True)
class Column:
    """The ratios of one device, by model and dtype, and how they were measured."""

    title: str
    device: str
    how: str
    command: str
    ratios: dict[tuple[str, str], Ratio]


def read_gpu_ratios() -> dict[tuple[str, str], Ratio]:
    """Return the ratio of each model that was measured on the GPU at batch 64."""
    ratios = {}
    for (model, batch), runs in group_by_model(benchmark=False).items():
        here = [r for r in runs if GPU in common_facts(r)["device"] and r.keys() >= PEERS]
        if batch != BATCH or not here:
            continue
        run = select_run(here)
        times = [float(row["median, ms"]) for row in (fastest_row(run, THEIRS), run["ours"])]
        facts = common_facts(run)
        ratios[model, "bf16"] = Ratio(
            inductor=times[0] / times[1],
            ipex28=None,
            date=facts["date"],
            torch=shorten_version(facts["torch"]),
        )
    return ratios


def read_cpu_ratios(present: str, absent: str | None) -> tuple[str, dict[tuple[str, str], Ratio]]:
    """Return the processor and the ratio of each model, on CPUs with one instruction set."""
    runs: dict[tuple[str, ...], dict[str, dict[str, Any]]] = {}
    for row in map(json.loads, (RESULTS / "cpu.jsonl").read_text().splitlines()):
        flags = row.get("flags", "").split()
        usable = "min_ms" in row and row["threads"] == THREADS and row["batch"] == 1
        if usable and present in flags and absent not in flags:
            run = row["model"], row["dtype"], row["date"], row["command"], row["commit"]
            runs.setdefault(run, {})[row["peer"]] = row
    ratios, processor = {}, ""
    for (model, dtype, *_), run in runs.items():  # a later run replaces an earlier one
        if run.keys() >= {"ipex", "inductor"}:
            ours, peer = run["ipex"], run.get("ipex28-trace")
            ratios[model, dtype] = Ratio(
                inductor=run["inductor"]["min_ms"] / ours["min_ms"],
                ipex28=peer["min_ms"] / ours["min_ms"] if peer else None,
                date=ours["date"],
                torch=shorten_version(ours["torch"]),
            )
            processor = ours["cpu"].partition(",")[0].replace("(R)", "").removesuffix(" Processor")
    return processor, ratios


def shorten_version(version: str) -> str:
    """Return the release series of a version: `2.11` of `2.11.0+cu130`."""
    return ".".join(version.split(".")[:2])


def read_columns() -> list[Column]:
    """Return the columns of the table."""
    how = "batch 64, medians in the default mode"
    columns = [Column("NVIDIA H200", "NVIDIA H200", how, GPU_COMMAND, read_gpu_ratios())]
    for title, present, absent, remark in CPUS:
        processor, ratios = read_cpu_ratios(present, absent)
        how = f"batch 1, two threads, minima in mode max-autotune{remark}"
        columns.append(Column(title, processor, how, CPU_COMMAND, ratios))
    return columns


def find_ratio(column: Column, row: Sequence[str | None]) -> Ratio | None:
    """Return what a row of the table has in a column."""
    model = row[1] if column.title.startswith("NVIDIA") else row[2]
    return column.ratios.get((model, row[3])) if model and row[3] else None


def format_range(values: Iterable[str]) -> str:
    """Return the least and the greatest value, or the only one."""
    ordered = sorted(values)
    return ordered[0] if ordered[0] == ordered[-1] else f"{ordered[0]} to {ordered[-1]}"


def describe_column(column: Column) -> str:
    """Return the line below the table that says how a column was measured."""
    shown = [r for row in MODELS if (r := find_ratio(column, row))]
    dates, versions = format_range(r.date for r in shown), format_range(r.torch for r in shown)
    device = "" if column.device == column.title else f" ({column.device})"
    also = ", and `nlp` likewise" if column.command == GPU_COMMAND else ""
    return (
        f"- **{column.title}**{device}: {column.how}, torch {versions}, {dates}; "
        f"`{column.command}`{also}."
    )


def make_table(columns: list[Column]) -> str:
    """Return the table in Markdown, with its plot and how each column was measured."""
    measured = [*columns[0].ratios.values()]
    mean = geometric_mean(ratio.inductor for ratio in measured)
    lines = [
        "<picture>",
        '  <source media="(prefers-color-scheme: dark)" srcset="docs/assets/results-dark.svg">',
        '  <img alt="Speed of backend ipex relative to Inductor\'s best mode and to IPEX 2.8" '
        'src="docs/assets/results-light.svg">',
        "</picture>",
        "",
        "| Inference | dtype | " + " | ".join(column.title for column in columns) + " |",
        "|---|---|" + "--:|" * len(columns),
    ]
    for row in MODELS:
        cells = [str(find_ratio(column, row) or "") for column in columns]
        if any(cells):
            lines.append(f"| {row[0]} | {row[3]} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "Speed relative to Inductor's best mode, in brackets relative to IPEX 2.8: above one, "
        "backend `ipex` is faster.",
        f"On the H200 the geometric mean over all {len(measured)} models that were measured beside "
        f"max-autotune at batch {BATCH} is {mean:.2f}.",
        "",
        *map(describe_column, columns),
    ]
    return "\n".join(lines)


@dataclass(frozen=True)
class Palette:
    """The colors of one plot."""

    text: str
    muted: str
    grid: str
    inductor: str
    ipex28: str


PALETTES = {
    "light": Palette("#1f2328", "#59636e", "#d1d9e0", "#2a78d6", "#eb6834"),
    "dark": Palette("#f0f6fc", "#9198a1", "#3d444d", "#3987e5", "#d95926"),
}
LEAST, MOST = 0.8, 6.0  # the ends of the axis; a longer bar is cut there
TICKS = (1, 1.5, 2, 3, 4, 6)
PANEL, LABELS, RIGHT = 460, 150, 50  # widths: of a panel, of its names, behind its axis
BAR, GAP, HEAD = 11, 7, 26  # heights: of a bar, between models, of a device's title
TOP = 64
Bar = tuple[str, float]  # the color's name in the palette, and the ratio
Group = tuple[str, list[tuple[str, list[Bar]]]]  # a device and its models


def list_groups(columns: list[Column]) -> list[Group]:
    """Return the bars of each device."""
    groups = []
    for column in columns:
        models = []
        for row in MODELS:
            if ratio := find_ratio(column, row):
                bars = [("inductor", ratio.inductor)]
                bars += [("ipex28", ratio.ipex28)] if ratio.ipex28 else []
                models.append((f"{row[0]}, {row[3]}", bars))
        groups.append((column.title, models))
    return groups


def place_ratio(ratio: float) -> float:
    """Return the distance of a ratio from the start of the axis, which is logarithmic."""
    share = math.log(min(max(ratio, LEAST), MOST) / LEAST) / math.log(MOST / LEAST)
    return round(share * (PANEL - LABELS - RIGHT), 1)


def draw_text(x: float, y: float, text: str, style: str) -> str:
    """Return a text element."""
    return f'<text x="{x:g}" y="{y:g}" {style}>{escape(text)}</text>'


def draw_bar(x: float, y: float, bar: Bar, palette: Palette) -> list[str]:
    """Return a bar that begins where the peer's speed is, and its value."""
    kind, ratio = bar
    one, end = place_ratio(1), place_ratio(ratio)
    start, width = min(one, end), max(abs(end - one), 1)
    value = f"{ratio:.2f}" + (" →" if ratio > MOST else "")
    return [
        f'<rect x="{x + start:g}" y="{y:g}" width="{width:g}" height="{BAR - 1}" rx="2" '
        f'fill="{getattr(palette, kind)}"/>',
        draw_text(x + max(one, end) + 4, y + BAR - 2, value, f'fill="{palette.text}"'),
    ]


def draw_panel(left: float, groups: list[Group], palette: Palette) -> tuple[list[str], float]:
    """Return a panel's elements and where it ends."""
    axis, y, bars = left + LABELS, float(TOP), []
    for title, models in groups:
        bars.append(draw_text(left, y + 14, title, f'class="h" fill="{palette.text}"'))
        y += HEAD
        for model, values in models:
            middle = y + len(values) * BAR / 2 + 4
            style = f'text-anchor="end" fill="{palette.text}"'
            bars.append(draw_text(axis - 6, middle, model, style))
            for value in values:
                bars += draw_bar(axis, y, value, palette)
                y += BAR
            y += GAP
        y += GAP
    lines = []
    for tick in TICKS:
        x, color = axis + place_ratio(tick), palette.text if tick == 1 else palette.grid
        lines.append(f'<path d="M{x:g} {TOP}V{y:g}" stroke="{color}"/>')
        style = f'text-anchor="middle" fill="{palette.muted}"'
        lines.append(draw_text(x, y + 14, f"{tick}x", style))
    return lines + bars, y + 24


def draw_plot(columns: list[Column], palette: Palette) -> str:
    """Return the plot as SVG: GPUs on the left, CPUs on the right."""
    groups = list_groups(columns)
    (left, one), (right, two) = (
        draw_panel(start, part, palette) for start, part in ((8, groups[:1]), (480, groups[1:]))
    )
    width, height = 2 * PANEL + 28, max(one, two)
    legend = []
    for x, kind, text in (
        (8, "inductor", "relative to Inductor's best mode"),
        (240, "ipex28", "relative to IPEX 2.8"),
    ):
        legend.append(
            f'<rect x="{x}" y="36" width="12" height="10" rx="2" fill="{getattr(palette, kind)}"/>'
        )
        legend.append(draw_text(x + 18, 45, text, f'fill="{palette.text}"'))
    title = "Inference speed of backend ipex (logarithmic axis; right of 1x is faster)"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height:g}" '
            f'viewBox="0 0 {width} {height:g}" role="img" aria-label="{escape(title)}">',
            "<style>text{font:11px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif}"
            "text.h{font-weight:600;font-size:13px}</style>",
            draw_text(8, 20, title, f'class="h" fill="{palette.text}"'),
            *legend,
            *left,
            *right,
            "</svg>",
            "",
        ]
    )


def make_files() -> dict[Path, str]:
    """Return the text of each file that the results are written to."""
    columns = read_columns()
    readme = README.read_text()
    before, rest = readme.split(BEGIN)
    after = rest.split(END)[1]
    files = {README: f"{before}{BEGIN}\n{make_table(columns)}\n{END}{after}"}
    for name, palette in PALETTES.items():
        files[ROOT / "docs" / "assets" / f"results-{name}.svg"] = draw_plot(columns, palette)
    return files


def main() -> None:
    """See the top of the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    options = parser.parse_args()
    files = make_files()
    stale = [path for path, text in files.items() if not path.exists() or path.read_text() != text]
    if options.check and stale:
        sys.exit(f"not as the rows give: {', '.join(path.name for path in stale)}")
    for path in () if options.check else stale:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text := files[path])
        print(f"{path.relative_to(ROOT)}: {len(text)} characters")


if __name__ == "__main__":
    main()
