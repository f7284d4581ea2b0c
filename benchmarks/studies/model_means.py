"""Summarize GPU results: geometric mean of Inductor's time over ours, over all models.

    python -m benchmarks model_means [--cudnn-benchmark] [--csv FILE]

Takes from `results/vision.jsonl` and `nlp.jsonl` the last run of each model at batch 1 and 64,
preferring runs with max-autotune: the better median of default and max-autotune over the better of
ours and tuned. Each line names these two, the GPU and the day, and the value of the very last run
if that is another one. A model of two libraries counts once. Runs in which cuDNN timed its kernels,
for all peers, are a separate set. Runs in fp16, or of models that are not channels-last, are not
counted.

`--csv` writes the last run of each vision model and batch instead, in the columns of timm's
benchmark tables plus peers and devices; the number of parameters comes from the library.
"""

import argparse
import csv
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import geometric_mean
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))


RESULTS = Path(__file__).parents[1] / "results"
TRANSFORMERS = ("timm:vit", "timm:swin", "bert", "roberta", "gpt2", "t5", "llama")
OURS, THEIRS = ("ours", "tuned"), ("inductor", "max-autotune")
# Torchvision's name of a model, and timm's.
SAME = {
    "densenet121": "timm:densenet121",
    "mobilenet_v3_large": "timm:mobilenetv3_large_100",
    "regnet_y_3_2gf": "timm:regnety_032",
}
COLUMNS = (
    "model,peer,infer_samples_per_sec,infer_step_time,infer_batch_size,infer_img_size,"
    "param_count,device"
)

Run = dict[str, dict[str, Any]]  # the row of each peer that has a speed


def read_runs(file: str, benchmark: bool) -> Iterator[Run]:
    """Return runs in order, with cuDNN's timing or without; a run begins with eager."""
    runs: dict[tuple[str, int], list[Run]] = {}
    for row in map(json.loads, (RESULTS / file).read_text().splitlines()):
        if row.keys() & {"dtype", "layout"} or ("--cudnn-benchmark" in row["command"]) != benchmark:
            continue
        of = runs.setdefault((row["model"], row["batch"]), [])
        if row["peer"] == "eager":
            of.append({})
        if "median, ms" in row:
            of[-1][row["peer"]] = row
    for several in runs.values():
        yield from filter(None, several)


def common_facts(run: Run) -> dict[str, Any]:
    """Return the facts that a run's rows share."""
    return next(iter(run.values()))


def fastest_row(run: Run, peers: Iterable[str]) -> dict[str, Any]:
    """Return the row of the fastest of these peers, of those that the run has."""
    return min((run[p] for p in peers if p in run), key=lambda row: float(row["median, ms"]))


def speed_ratio(run: Run) -> float:
    """Return Inductor's time over ours."""
    return float(fastest_row(run, THEIRS)["median, ms"] / fastest_row(run, OURS)["median, ms"])


def group_by_model(benchmark: bool) -> dict[tuple[str, int], list[Run]]:
    """Return the runs that have both sides, oldest first; a model of two libraries has one name."""
    found: dict[tuple[str, int], list[Run]] = {}
    for run in (r for file in ("vision.jsonl", "nlp.jsonl") for r in read_runs(file, benchmark)):
        if run.keys() & set(OURS) and run.keys() & set(THEIRS):
            model, batch = common_facts(run)["model"], common_facts(run)["batch"]
            found.setdefault((SAME.get(model, model), batch), []).append(run)
    return {
        key: sorted(runs, key=lambda run: common_facts(run)["date"]) for key, runs in found.items()
    }


def select_run(runs: list[Run]) -> Run:
    """Return the last run with max-autotune, else the last."""
    return ([run for run in runs if "max-autotune" in run] or runs)[-1]


def describe_ratio(run: Run) -> str:
    """Return the peers, GPU and day of a ratio."""
    theirs, ours = fastest_row(run, THEIRS), fastest_row(run, OURS)
    gpu = ours["device"].split(":")[-1].removeprefix("NVIDIA-").split("-")[0]
    only = "" if "max-autotune" in run else ", no max-autotune"
    return f"{theirs['peer']} / {ours['peer']}, {gpu}, {ours['date']}{only}"


def print_means(benchmark: bool) -> None:
    """Print each ratio, and their geometric means."""
    runs = {key: of for key, of in group_by_model(benchmark).items() if key[1] in (1, 64)}
    found = {key: speed_ratio(select_run(of)) for key, of in runs.items()}
    for (model, batch), each in sorted(found.items()):
        of = runs[model, batch]
        other = (
            ""
            if of[-1] is select_run(of)
            else f"; the last {speed_ratio(of[-1]):.3f}, {describe_ratio(of[-1])}"
        )
        print(f"{model:34} {batch:3} {each:6.3f}  {describe_ratio(select_run(of))}{other}")
    nets = [r for (m, b), r in found.items() if b == 64 and not m.startswith(TRANSFORMERS)]
    others = [
        r
        for (m, b), r in found.items()
        if m.startswith(TRANSFORMERS) and (b == 64 or m == "llama-decode")
    ]
    groups = {
        "convolutional nets at 64": nets,
        "transformers at 64, decoding at 1 too": others,
        "all": [*found.values()],
    }
    for name, ratios in groups.items():
        if not ratios:
            continue
        print(f"{name}: {len(ratios)}, mean {geometric_mean(ratios):.3f}, least {min(ratios):.3f}")


def timm_table(file: Path, benchmark: bool) -> None:
    """Return the last run of each vision model at each batch, as a table."""
    from vision import PIXELS, millions

    last: dict[tuple[str, int], Run] = {}
    for run in read_runs("vision.jsonl", benchmark):
        last[common_facts(run)["model"], common_facts(run)["batch"]] = run
    with file.open("w", newline="") as out:
        table = csv.writer(out, lineterminator="\n")
        table.writerow(COLUMNS.split(","))
        for (model, batch), run in sorted(last.items()):
            size = batch, PIXELS, millions(model)
            for peer, row in run.items():
                speed = row["per second"], row["median, ms"]
                table.writerow([model, peer, *speed, *size, row["device"]])


def main() -> None:
    """See the top of the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cudnn-benchmark", action="store_true")
    parser.add_argument("--csv", type=Path, help="write this table, and no means")
    options = parser.parse_args()
    if options.csv:
        timm_table(options.csv, options.cudnn_benchmark)
    else:
        print_means(options.cudnn_benchmark)


if __name__ == "__main__":
    main()
