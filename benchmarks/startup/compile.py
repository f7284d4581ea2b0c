"""Measure compile time of our passes as a share of Inductor's first call.

    python -m benchmarks startup compile [--models resnet50 bert] [--profile] [--json FILE]

Models of the demo, in processes of their own with empty cache folders; one-time costs of a process
are paid before. Processor seconds count this process and its compilers, and hardly depend on other
load. Each figure is the least of the repetitions.
"""

import argparse
import cProfile
import datetime
import importlib
import json
import platform
import pstats
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ipex_inductor.cli.demo import measure, models

# Timed functions, by the module that calls them; an indented part belongs to the one above it.
PARTS = {
    "cache keys": "compiler.request:Request.key",
    "joint pass": "passes.joint:JointPass.__call__",
    "  views and clones": "passes.joint:drop_noops",
    "  weights": "passes.pass_context:weights_of",
    "  folding": "passes.layout.folding:fold_batch_norms",
    "  rules": "passes.joint:apply_rules",
    "    tracing patterns": "passes.engine.rule:_patterns",
    "    checking matches": "passes.engine.rule:_accept",
    "    tracing replacements": "passes.engine.rule:_rewrite",
    "  linears on one input": "passes.fusion.shared_input:join_linears",
    "  decomposing": "passes.joint:decompose",
    "prologue split": "passes.weights.prologue:split",
    "  fitting to kernels": "passes.weights.prologue:fit_to_kernels",
    "  packing": "passes.weights.prologue:pack_weights",
    "  weights again": "passes.weights.prologue:weight_only",
}
OURS = [part for part in PARTS if not part.startswith(" ")]
Spent = dict[str, list[float]]


def read_clocks() -> tuple[float, float]:
    """Return processor seconds, children included, and wall seconds."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime, time.perf_counter()


@contextmanager
def add_time(spent: Spent, part: str) -> Iterator[None]:
    """Add the time that is spent inside to `part`."""
    before = read_clocks()
    try:
        yield
    finally:
        row = spent.setdefault(part, [0.0, 0.0])
        for i, (start, end) in enumerate(zip(before, read_clocks(), strict=True)):
            row[i] += end - start


def time_parts(spent: Spent) -> None:
    """Replace every function of `PARTS` by one that is timed."""
    for part, place in PARTS.items():
        module, _, path = place.partition(":")
        *owners, name = path.split(".")
        holder: Any = importlib.import_module(f"ipex_inductor.{module}")
        for owner in owners:
            holder = getattr(holder, owner)
        setattr(holder, name, _timed(spent, part, getattr(holder, name)))


def _timed(spent: Spent, part: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with add_time(spent, part):
            return fn(*args, **kwargs)

    return call


def measure_first_call(backend: str, name: str, profile: bool) -> Spent:
    """Return seconds of one backend's first call in this process: of each part and of all."""
    model, inputs = models.load(name, "bf16", 1, "cpu")
    measure.start_compiler(torch.bfloat16, "cpu")
    torch.compiler.reset()
    spent: Spent = {}
    with add_time(spent, "importing"):
        if backend == "ipex":
            importlib.import_module("ipex_inductor.passes.joint")
            importlib.import_module("ipex_inductor.lowerings").register()
    if not profile:
        time_parts(spent)
    profiler = cProfile.Profile()
    with torch.no_grad(), add_time(spent, "first call"), profiler if profile else add_time({}, ""):
        torch.compile(model, backend=backend)(*inputs)
    if profile:
        pstats.Stats(profiler, stream=sys.stderr).sort_stats("cumulative").print_stats(
            "ipex_inductor|pattern_matcher|proxy_tensor|graph.py"
        )
    return spent


def run_process(backend: str, name: str, profile: bool = False) -> Spent:
    """Run `measure_first_call` in a process with empty caches."""
    call = f"compile.measure_first_call{(backend, name, profile)}"
    program = f"import compile, json; print(json.dumps({call}))"
    with tempfile.TemporaryDirectory() as folder:
        measure.use_folder(Path(folder))  # in our environment, which the child inherits
        done = subprocess.run(
            [sys.executable, "-c", program],
            cwd=Path(__file__).parent,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    spent: Spent = json.loads(done.stdout.splitlines()[-1])
    return spent


def least(runs: list[Spent]) -> Spent:
    """Return the least of each figure."""
    return {part: [min(r[part][i] for r in runs) for i in (0, 1)] for part in runs[0]}


def main() -> None:
    """Print a table for each model; with --json also append one line a row to FILE."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["resnet50", "bert"])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="print where ipex spends its time")
    parser.add_argument("--json", help="append the rows to this file, one JSON object a line")
    options = parser.parse_args()
    facts = {
        "date": datetime.date.today().isoformat(),
        "command": "python -m benchmarks startup compile",
        "torch": torch.__version__,
        "device": f"{platform.machine()}, {torch.get_num_threads()} threads",
    }
    for name in options.models:
        if options.profile:
            run_process("ipex", name, profile=True)
            continue
        pairs = [
            (run_process("inductor", name), run_process("ipex", name))
            for _ in range(options.repeat)
        ]
        plain, ours = (least(list(runs)) for runs in zip(*pairs, strict=True))
        rows = {"Inductor's first call": plain["first call"], "ours": ours.pop("first call")}
        sums = [sum(ours[part][i] for part in ("importing", *OURS)) for i in (0, 1)]
        rows |= {"our passes": sums, "  importing": ours.pop("importing")}
        rows |= {f"  {part}": ours[part] for part in PARTS if part in ours}
        print(f"{name}: seconds of the processor and of the wall, share of Inductor's first call")
        for part, seconds in rows.items():
            shares = [s / total for s, total in zip(seconds, plain["first call"], strict=True)]
            print(
                f"{part:32}", *(f"{s:8.3f} {x:6.1%}" for s, x in zip(seconds, shares, strict=True))
            )
            if options.json:
                row = {"model": name, "part": part.strip(), "cpu_s": round(seconds[0], 3)}
                row |= {"wall_s": round(seconds[1], 3), "cpu_share": round(shares[0], 4)}
                with open(options.json, "a") as file:
                    file.write(json.dumps({**row, **facts}) + "\n")


if __name__ == "__main__":
    main()
