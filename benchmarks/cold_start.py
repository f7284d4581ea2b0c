"""The first call of models on a CPU with nothing cached, and the calls behind it.

    python benchmarks/cold_start.py [--models resnet50 bert] [--rounds N] [--json FILE]

Backend `ipex` where C++ calls the kernels, as by default, and where Python does, and `inductor`, in
turns, each in a process and with caches of its own. The clock runs from `torch.compile` on, so it
has what a process's first compilation imports, and what is asked of g++ once a machine: Inductor
precompiles its headers, and tries what vectors there are.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import cpu_peer
import torch
from cpu_kernels import keep

ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "ipex": ("ipex", {}),
    "ipex, Python calls": ("ipex", {"cpp_wrapper": False}),
    "inductor": ("inductor", {}),
}
CALLS = 100


def timed(model: str, arm: str) -> dict[str, float]:
    """Seconds of the first call, and the least and median milliseconds of later ones."""
    net, inputs = cpu_peer.made(model, torch.bfloat16, 1)
    backend, options = ARMS[arm]
    if backend == "ipex":
        import ipex_inductor  # noqa: F401  # as its users may
    compiled = torch.compile(net, backend=backend, options=options)
    began, calls = time.perf_counter(), []
    with torch.no_grad():
        compiled(*inputs)
        first = time.perf_counter() - began
        for _ in range(CALLS):
            began = time.perf_counter()
            compiled(*inputs)
            calls.append(1e3 * (time.perf_counter() - began))
    return {"first_s": first, "least_ms": min(calls), "median_ms": statistics.median(calls)}


def in_a_process(model: str, arm: str) -> dict[str, float]:
    """What `timed` says in a process with caches of its own."""
    with tempfile.TemporaryDirectory() as folder:
        tmp = Path(folder) / "tmp"  # where torch keeps its own, headers too
        tmp.mkdir()
        env = {k: v for k, v in os.environ.items() if not k.startswith("TORCHINDUCTOR_CACHE")}
        env |= {"IPEX_HOME": folder, "TMPDIR": str(tmp)}
        command = [sys.executable, __file__, "--one", model, arm]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
        if done.returncode:
            raise RuntimeError(done.stderr)
    said: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return said


def main() -> None:
    """Measure in turns; a line a process, then medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--models", nargs="+", choices=cpu_peer.MODELS, default=["resnet50", "bert"]
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="file for the lines")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(timed(*options.one)))
        return
    options.threads = torch.get_num_threads()
    cases = [(model, arm) for model in options.models for arm in ARMS]
    found: dict[tuple[str, str], list[dict[str, float]]] = {case: [] for case in cases}
    for _ in range(options.rounds):
        for (model, arm), figures in found.items():
            figures.append(in_a_process(model, arm))
            load = round(os.getloadavg()[0], 1)
            keep({"model": model, "arm": arm, **figures[-1], "load": load}, options)
    for (model, arm), figures in found.items():
        medians = {name: statistics.median(each[name] for each in figures) for name in figures[0]}
        print(f"{model:12} {arm:20}", *(f"{name} {value:.2f}" for name, value in medians.items()))


if __name__ == "__main__":
    main()
