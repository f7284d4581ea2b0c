"""Measure processes of one machine that compile ResNet-18 for a CPU at once, cold.

    python -m benchmarks concurrent_cold_start [--processes N] [--rounds N]

In turns, all processes wait for the one that compiles first, or each compiles for itself
(WORLD_SIZE marks them as ranks, which never wait). Prints processor seconds of all processes and
their compilers, and wall seconds to the last first output; the best of the rounds. The load of the
machine is part of them.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from common.resnet18 import ResNet18

WAYS = {"waiting": "1", "each for itself": "2"}
CACHES_ON = {"TORCHINDUCTOR_FX_GRAPH_CACHE": "1", "TORCHINDUCTOR_AUTOGRAD_CACHE": "1"}


def print_first_output() -> None:
    """Compile in this process; print when the output is there and what the cache had."""
    torch.manual_seed(0)
    model, x = ResNet18().eval(), torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        y = torch.compile(model, backend="ipex", options={"strict": True})(x)
        print("first output", flush=True)
        torch.testing.assert_close(y, model(x), rtol=1e-3, atol=1e-4)  # folded in fp64
    from ipex_inductor.reporting import decisions

    print(*(e.subject for r in decisions.reports() for e in r.events if e.kind == "cache"))


def run_processes(count: int, world: str) -> tuple[float, float, list[str]]:
    """Return processor seconds, wall seconds to the last first output, and cache events."""
    left_out = {"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"}
    inherited = {name: value for name, value in os.environ.items() if name not in left_out}
    before, began = _processor_seconds(), time.perf_counter()
    with tempfile.TemporaryDirectory() as home:
        env = inherited | CACHES_ON | {"IPEX_HOME": home, "WORLD_SIZE": world}
        command = [sys.executable, __file__, "--child"]
        started = [
            subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
            for _ in range(count)
        ]
        for process in started:
            assert process.stdout is not None
            assert process.stdout.readline() == "first output\n"
        wall = time.perf_counter() - began
        found = [process.communicate()[0].strip() for process in started]
    assert not any(process.returncode for process in started)
    return _processor_seconds() - before, wall, sorted(found)


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Measure both ways in turns."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    told = parser.parse_args()
    if told.child:
        print_first_output()
        return
    load, best = os.getloadavg()[0], dict.fromkeys(WAYS, (float("inf"), float("inf")))
    for _ in range(told.rounds):
        for way, world in WAYS.items():
            cpu, wall, found = run_processes(told.processes, world)
            print(f"{way:16} {cpu:6.1f} s of processors, {wall:5.1f} s wall: {found}", flush=True)
            best[way] = min(best[way][0], cpu), min(best[way][1], wall)
    cores, after = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    print(f"torch {torch.__version__}, {cores} cores, load {load:.1f} before and {after:.1f} after")
    for way, (cpu, wall) in best.items():
        print(f"{Path(__file__).stem}: {way:16} best {cpu:.1f} s of processors, {wall:.1f} s wall")


if __name__ == "__main__":
    main()
