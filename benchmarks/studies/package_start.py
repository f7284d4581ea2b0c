"""Measure a packaged ResNet-50 on a CPU from load to first output, in fresh processes.

    python -m benchmarks package_start [--rounds N] [--json FILE]

Batch 1 in fp32, in parts, as wall and CPU time. The clock starts after `import torch`; the state
dict comes from `torch.load(mmap=True)`. CPU time is that of the main thread, which spins while it
waits for torch's other threads. Each output is checked against eager.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import ipex_inductor
from ipex_inductor.cli.demo.models import load

PARTS = ("state dict", "load", "first run")
CHILD = """
import json, sys, time
import torch
times = [(time.perf_counter(), time.thread_time())]
mark = lambda: times.append((time.perf_counter(), time.thread_time()))
saved = torch.load(sys.argv[1], mmap=True)
mark()
import ipex_inductor
model = ipex_inductor.load(sys.argv[2], weights=saved["weights"], allow_unsigned=True)
mark()
got = model(saved["input"])
mark()
heavy = [name for name in ("torch._dynamo", "torch._inductor") if name in sys.modules]
assert not heavy, heavy
torch.testing.assert_close(got, saved["want"], rtol=1e-4, atol=1e-4)  # 53 layers, folded in fp64
print(json.dumps(times))
"""


class Logits(nn.Module):
    """The model, as tensor in and tensor out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The logits of a batch of images."""
        return self.model(x).logits


def measure(rounds: int, folder: Path) -> dict[str, list[float]]:
    """Return seconds of every round, by part; "wall" and "cpu" are of all parts together."""
    model, (x,) = load("resnet50", None, 1, "cpu")
    model = Logits(model).eval()
    ipex_inductor.package(model, (x,), folder / "model.ipexbundle")
    with torch.no_grad():
        saved = {"weights": model.state_dict(), "input": x, "want": model(x)}
    torch.save(saved, folder / "saved")
    found: dict[str, list[float]] = {name: [] for name in (*PARTS, "wall", "cpu")}
    command = [sys.executable, "-c", CHILD, str(folder / "saved"), str(folder / "model.ipexbundle")]
    for _ in range(rounds):
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        walls, cpus = zip(*json.loads(done.stdout), strict=True)
        for name, begin, end in zip(PARTS, walls, walls[1:], strict=False):
            found[name].append(end - begin)
        found["wall"].append(walls[-1] - walls[0])
        found["cpu"].append(cpus[-1] - cpus[0])
    return found


def main() -> None:
    """Measure and print the best and the median of the rounds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    told = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(told.rounds, Path(folder))
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {told.rounds} rounds")
    for name, seconds in found.items():
        print(f"{name:10}  best {min(seconds):.3f} s  median {statistics.median(seconds):.3f} s")
    if told.json:
        told.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
