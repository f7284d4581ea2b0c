"""How much faster than Inductor's better mode ours is on a GPU, of all models that were measured.

    python benchmarks/model_means.py [--cudnn-benchmark]

Of `results/vision.jsonl` and `nlp.jsonl` the last run of each model at one and at 64 images or
texts, of those with max-autotune if there is any: the better median of default and max-autotune
over the better of ours and the tuned one.
Runs in which cuDNN timed its kernels, for all peers, are a set of their own; those in fp16 count
nowhere.
"""

import argparse
import json
from pathlib import Path
from statistics import geometric_mean

RESULTS = Path(__file__).parent / "results"
TRANSFORMERS = ("timm:vit", "timm:swin", "bert", "roberta", "gpt2", "t5", "llama")


def ratio(speeds: dict[str, float]) -> float | None:
    """Theirs over ours; None where one of them has no row."""
    ours = [speeds[p] for p in ("ours", "tuned") if p in speeds]
    theirs = [speeds[p] for p in ("inductor", "max-autotune") if p in speeds]
    return min(theirs) / min(ours) if ours and theirs else None


def last_runs(benchmark: bool) -> dict[tuple[str, int], float]:
    """By model and batch, with cuDNN's timing or without; a run begins with its eager row."""
    runs: dict[tuple[str, int], list[dict[str, float]]] = {}
    for name in ("vision.jsonl", "nlp.jsonl"):
        for row in map(json.loads, (RESULTS / name).read_text().splitlines()):
            if "dtype" in row or ("--cudnn-benchmark" in row["command"]) != benchmark:
                continue
            of = runs.setdefault((row["model"], row["batch"]), [])
            if row["peer"] == "eager":
                of.append({})
            if "median, ms" in row:
                of[-1][row["peer"]] = row["median, ms"]
    both = {key: [o for o in of if "max-autotune" in o] for key, of in runs.items()}
    found = {key: [r for r in map(ratio, both[key] or of) if r] for key, of in runs.items()}
    return {key: ratios[-1] for key, ratios in found.items() if ratios}


def main() -> None:
    """Print each, and their geometric means."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cudnn-benchmark", action="store_true")
    benchmark = parser.parse_args().cudnn_benchmark
    found = {key: each for key, each in last_runs(benchmark).items() if key[1] in (1, 64)}
    for (model, batch), each in sorted(found.items()):
        print(f"{model:34} {batch:3} {each:6.3f}")
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


if __name__ == "__main__":
    main()
