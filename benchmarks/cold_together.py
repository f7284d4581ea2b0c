"""Processes of one machine that start cold together: ResNet-18 on a CPU, nothing in the cache.

    python benchmarks/cold_together.py [--processes N] [--rounds N]

Alternately they wait for the one that compiles first, and each compiles for itself (WORLD_SIZE says
that they are ranks, which never wait). Processor seconds of all of them and their compilers, and
wall seconds to the last first output; the best of the rounds. The machine's load is in them.
"""

import argparse
import itertools
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

WAYS = {"waiting": "1", "each for itself": "2"}
CACHES_ON = {"TORCHINDUCTOR_FX_GRAPH_CACHE": "1", "TORCHINDUCTOR_AUTOGRAD_CACHE": "1"}


class Block(nn.Module):
    """Two convolutions with batch norms, and the way around them."""

    def __init__(self, entering: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(entering, width, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.down = nn.Sequential()
        if entering != width:
            down = nn.Conv2d(entering, width, 1, stride, bias=False)
            self.down = nn.Sequential(down, nn.BatchNorm2d(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, entering, H, W) to (N, width, H / stride, W / stride)."""
        y = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        return (y + self.down(x)).relu()


class ResNet18(nn.Module):
    """The network of He et al. (2015), table 1."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
        self.pool = nn.MaxPool2d(3, 2, 1)
        widths = (64, 64, 64, 128, 128, 256, 256, 512, 512)
        pairs = itertools.pairwise(widths)
        blocks = [Block(before, width, 1 + (before != width)) for before, width in pairs]
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(512, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, 3, 224, 224) images to (N, 1000) logits."""
        y: torch.Tensor = self.blocks(self.pool(self.bn(self.conv(x)).relu()))
        result: torch.Tensor = self.head(y.mean((2, 3)))
        return result


def first_output() -> None:
    """What each of the processes does; says what it found in the cache."""
    torch.manual_seed(0)
    model, x = ResNet18().eval(), torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        y = torch.compile(model, backend="ipex", options={"strict": True})(x)
        print("first output", flush=True)
        torch.testing.assert_close(y, model(x), rtol=1e-3, atol=1e-4)  # folded in fp64
    from ipex_inductor.reporting import decisions

    print(*(e.subject for r in decisions.reports() for e in r.events if e.kind == "cache"))


def together(count: int, world: str) -> tuple[float, float, list[str]]:
    """Processor seconds, wall seconds to the last first output, and what was found."""
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
        first_output()
        return
    load, best = os.getloadavg()[0], dict.fromkeys(WAYS, (float("inf"), float("inf")))
    for _ in range(told.rounds):
        for way, world in WAYS.items():
            cpu, wall, found = together(told.processes, world)
            print(f"{way:16} {cpu:6.1f} s of processors, {wall:5.1f} s wall: {found}", flush=True)
            best[way] = min(best[way][0], cpu), min(best[way][1], wall)
    cores, after = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    print(f"torch {torch.__version__}, {cores} cores, load {load:.1f} before and {after:.1f} after")
    for way, (cpu, wall) in best.items():
        print(f"{Path(__file__).stem}: {way:16} best {cpu:.1f} s of processors, {wall:.1f} s wall")


if __name__ == "__main__":
    main()
