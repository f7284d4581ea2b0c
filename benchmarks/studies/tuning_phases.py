"""Measure tuning phase by phase: choices compiled one after the other, and in parallel.

    python -m benchmarks tuning_phases [--shapes WORDS ...] [--lines LINE ...] [--turns N]
        [--json FILE]

Each variant runs in processes of its own, in turns, with empty caches: first with one compiler,
then with Inductor's number of compilers. Problems are those of `ops conv` whose names contain one
of the words, or lines in the format of `autotune run`. Seconds: `trial` makes inputs and reference
results, `lower` is Inductor up to the kernels, `wait` is for its workers (and what is compiled
alone), `verify` the first calls and the comparison, `race` the measurements. `ready` says whether
the workers had started when the problem began; until then kernels are compiled in the process
itself, within `lower`.
"""

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from ipex_inductor import compat
from ipex_inductor.autotune.pool import Pool
from ipex_inductor.autotune.record import Problem, Record
from ipex_inductor.lowerings.problem import settings, shapes
from ipex_inductor.lowerings.tune import compiling, parallel_compile, tuner
from ipex_inductor.target import device

sys.path.insert(0, str(Path(__file__).parents[1]))
from ops import conv as ops_conv

RESNET = ["stem 7x7/2 resnet", "resnet 256<-64@56 1", "resnet 512<-128@28 1"]
WAYS = ("one by one", "at once")
# What is timed: owner, function, phase.
PHASES = (
    (tuner, "_trial", "trial"),
    (compiling, "offered", "lower"),
    (parallel_compile.Graphs, "_start_graphs", "lower"),
    (parallel_compile.Graphs, "next", "wait"),
    (tuner, "_candidate", "verify"),
    (tuner.Tuner, "_race_candidates", "race"),
)


class Phases:
    """Seconds by phase; what one phase calls of another counts for that alone."""

    def __init__(self) -> None:
        self.spent: Counter[str] = Counter()
        self._inside: list[str] = []
        self._since = time.perf_counter()

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """What happens meanwhile is of that phase."""
        self._turn()
        self._inside.append(name)
        try:
            yield
        finally:
            self._turn()
            self._inside.pop()

    def follow(self, owner: Any, function: str, name: str) -> None:
        """Every call of that function is of that phase."""
        usual = getattr(owner, function)

        @functools.wraps(usual)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.of(name):
                return usual(*args, **kwargs)

        setattr(owner, function, timed)

    def _turn(self) -> None:
        now = time.perf_counter()
        if self._inside:
            self.spent[self._inside[-1]] += now - self._since
        self._since = now


class Silent:
    """There is no parent to tell."""

    def choices(self, choices: Any) -> None:
        """Of the problem."""

    def doing(self, number: int) -> None:
        """A choice."""


def workers_ready() -> bool:
    """Return whether Inductor's workers for Triton have started."""
    from torch._inductor.async_compile import AsyncCompile

    begun = AsyncCompile._ready_future
    return begun is not None and begun.done()


def read_problems(lines: list[str]) -> list[Problem]:
    """Return the problems for this machine's GPU, or for its CPU if there is none."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    return [*shapes.problems(lines, str(device.current(kind)), settings.settings_of(kind))]


def problem_row(record: Record, phases: Phases, whole: float) -> dict[str, Any]:
    """Return the row of one problem."""
    found = Pool()
    found.add(record.outcomes, {})
    best = found.best()
    reasons = [f"{o.choice.name}: {o.reason}" for o in record.outcomes if o.reason]
    return {
        "choices": len(record.outcomes),
        "timed": sum(o.timing is not None for o in record.outcomes),
        "with registers": sum(o.registers is not None for o in record.outcomes),
        "all, s": round(whole, 2),
        **{f"{name}, s": round(phases.spent[name], 2) for *_, name in PHASES},
        "best": f"{best.choice.name} {[*best.choice.parameters.values()]}" if best else "",
        "best, us": round(best.p50, 1) if best else None,
        "out": reasons,
    }


def measure(way: str, lines: list[str]) -> None:
    """Tune all problems in this process; print a JSON object for each."""
    if way == WAYS[0]:
        compat.compilers = lambda: 1  # type: ignore[assignment]
    for line, problem in zip(lines, read_problems(lines), strict=True):
        begun_ready, begin = workers_ready(), time.perf_counter()
        phases.spent.clear()
        record = tuner.Tuner(Silent()).tune(problem, (), 600)  # type: ignore[arg-type]
        found = problem_row(record, phases, time.perf_counter() - begin)
        print(json.dumps({"way": way, "line": line, "ready": begun_ready, **found}), flush=True)


phases = Phases()


def run_process(way: str, lines: list[str]) -> list[dict[str, Any]]:
    """Run `measure` in a process with empty caches."""
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": folder, "IPEX_HOME": f"{folder}/home"}
        env.pop("TRITON_CACHE_DIR", None)
        command = [sys.executable, __file__, "--way", way, "--lines", *lines]
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def print_row(found: dict[str, Any], name: str) -> None:
    """Print a row, and a line for each rejected choice."""
    times = "  ".join(
        f"{key[:-3]} {value:5.1f}" for key, value in found.items() if key[-3:] == ", s"
    )
    about = f"{found['timed']}/{found['choices']} timed, {found['with registers']} with registers"
    print(f"{name:<24} {found['way']:<10} {times}  {'ready' if found['ready'] else '-':<5} {about}")
    print(f"{'':<35} {found['best']} {found['best, us']} us")
    for reason in found["out"]:
        print(f"{'':<35} out: {reason}")


def main() -> None:
    """Both ways in turns, and what all problems took in each."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", nargs="+", default=RESNET, help="words of names in ops_conv.py")
    parser.add_argument("--lines", nargs="+", help="problems instead, as `autotune run` takes them")
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--json", help="append the rows to this file, one JSON object a line")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        for each in PHASES:
            phases.follow(*each)
        measure(options.way, options.lines)
        return
    named = {
        name: f"ipex.conv.default bfloat16 {line}"
        for name, line in ops_conv.SHAPES.items()
        if any(word in name for word in options.shapes)
    }
    if options.lines:
        named = {f"{i}: {line[:20]}": line for i, line in enumerate(options.lines)}
    known = {"date": datetime.now(UTC).strftime("%Y-%m-%d"), "torch": str(torch.__version__)}
    known |= {"command": " ".join(["python", "-m", "benchmarks", "tuning_phases", *sys.argv[1:]])}
    known |= {"compilers": compat.compilers(), "device": read_problems([*named.values()])[0].arch}
    whole: Counter[str] = Counter()
    for way in WAYS * options.turns:
        for name, found in zip(named, run_process(way, [*named.values()]), strict=True):
            print_row(found, name)
            whole[way] += found["all, s"]
            if options.json:
                with open(options.json, "a") as file:
                    file.write(json.dumps({**known, "shape": name, **found}) + "\n")
    print(", ".join(f"{way}: {seconds / options.turns:.1f} s" for way, seconds in whole.items()))


if __name__ == "__main__":
    main()
