"""Measure a second process of ResNet-50 on a CPU, from `import torch` to its first output.

    python -m benchmarks startup warm [--rounds N] [--json FILE]

Backend `ipex` with its kernel cache, with and without `import ipex_inductor`, and `inductor` with a
folder of its own, in turns, each after a cold process: `benchmarks/common/warm_start_program.py`
defines what is timed. The load average is printed, as it affects the figures.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

PROGRAM = Path(__file__).parents[1] / "common" / "warm_start_program.py"
BACKENDS = {  # the program's arguments, and what names the folder where each keeps things
    "ipex": "IPEX_HOME",
    "ipex+import": "IPEX_HOME",
    "inductor": "TORCHINDUCTOR_CACHE_DIR",
}
CACHES_ON = {"TORCHINDUCTOR_FX_GRAPH_CACHE": "1", "TORCHINDUCTOR_AUTOGRAD_CACHE": "1"}
# An installed package has its bytecode; for a checkout the cold process writes it.
WITHOUT = {*BACKENDS.values(), "PYTHONDONTWRITEBYTECODE"}


def run_process(backend: str, folder: Path, **variables: str) -> dict[str, Any]:
    """Run one process and return its output; `folder` is the backend's only cache."""
    inherited = {k: v for k, v in os.environ.items() if k not in WITHOUT}
    env = {**inherited, **CACHES_ON, BACKENDS[backend]: str(folder), **variables}
    command = [sys.executable, str(PROGRAM), *backend.split("+")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(done.stderr)
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


def measure(rounds: int, folder: Path) -> dict[str, dict[str, list[float]]]:
    """Return seconds of every warm process, by backend and clock."""
    names = ("wall", "cpu", "import torch")
    found: dict[str, dict[str, list[float]]] = {b: {n: [] for n in names} for b in BACKENDS}
    for backend in BACKENDS:
        cold = run_process(backend, folder / backend)
        print(f"{backend:13} cold: {cold['wall']:.1f} s", flush=True)
    for _ in range(rounds):
        for backend, seconds in found.items():
            warm = run_process(backend, folder / backend)
            if warm["aot"] != [1, 0]:
                raise RuntimeError(f"{backend} compiled again: {warm}")
            for name, values in seconds.items():
                values.append(warm[name])
    return found


def main() -> None:
    """Measure and print the best and the median of the rounds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    told = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        found = measure(told.rounds, Path(folder))
    cores, after = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    print(f"torch {torch.__version__}, {cores} cores, load {load:.1f} before and {after:.1f} after")
    for backend, seconds in found.items():
        for name, values in seconds.items():
            best, median = min(values), statistics.median(values)
            print(f"{backend:13} {name:12}  best {best:.2f} s  median {median:.2f} s")
    if told.json:
        told.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
