"""Measure the first call of models on a CPU with empty caches, and the calls after it.

    python -m benchmarks startup cold [--models resnet50 bert] [--rounds N] [--json FILE]
    python -m benchmarks startup cold --training [--models unet resnet18 bert vit mixture] [--warm]

Backend `ipex` with kernels called from C++ (the default) and from Python, and `inductor`, in turns,
each in a process with caches of its own. The clock starts at `torch.compile`, so it includes what a
process's first compilation imports and one-time work of g++: precompiled headers and the probing of
vector ISAs.

`--training`: the first forward and backward of five small models in fp32. Imports that any graph
needs happen before the clock starts. Beside wall seconds stand processor seconds of the process and
its compilers, which other load hardly changes, and the number of compilers. `--warm`: a second
process too, which finds everything cached.
"""

import argparse
import importlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import cpu_peer
from common.cpu_kernels import append_row
from common.resnet18 import ResNet18

ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "ipex": ("ipex", {}),
    "ipex, Python calls": ("ipex", {"cpp_wrapper": False}),
    "inductor": ("inductor", {}),
}
TRAINED = {arm: ARMS[arm] for arm in ("ipex", "inductor")}
CALLS = 100
SMALL = {"num_hidden_layers": 2, "hidden_size": 192, "num_attention_heads": 3}


class UNet(nn.Module):
    """Two levels down and up again, with group norms."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.down1, self.down2 = self._block(3, width), self._block(width, 2 * width)
        self.bottom = self._block(2 * width, 4 * width)
        self.up2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2)
        self.up1 = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.back2, self.back1 = self._block(4 * width, 2 * width), self._block(2 * width, width)
        self.head = nn.Conv2d(width, 3, 1)

    @staticmethod
    def _block(entering: int, width: int) -> nn.Sequential:
        layers: list[nn.Module] = []
        for before in (entering, width):
            layers += [nn.Conv2d(before, width, 3, padding=1), nn.GroupNorm(8, width), nn.SiLU()]
        return nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3, H, W) to the same; H and W are multiples of 4."""
        high = self.down1(x)
        middle = self.down2(nn.functional.max_pool2d(high, 2))
        low = self.bottom(nn.functional.max_pool2d(middle, 2))
        middle = self.back2(torch.cat([self.up2(low), middle], 1))
        result: Tensor = self.head(self.back1(torch.cat([self.up1(middle), high], 1)))
        return result


def mixture() -> nn.Module:
    """Return a model of convolutions, a pool and an MLP."""
    images = (
        *(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AvgPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.GELU(), nn.AdaptiveAvgPool2d(4), nn.Flatten()),
    )
    rows = nn.Linear(512, 256), nn.LayerNorm(256), nn.GELU(), nn.Linear(256, 10)
    return nn.Sequential(*images, *rows)


def bert() -> nn.Module:
    """Return a BERT of two layers of 192 features, with dropout."""
    config = transformers.BertConfig(**SMALL, intermediate_size=768)
    return cpu_peer.Whole(transformers.BertModel(config))


def vit() -> nn.Module:
    """Return a ViT of two layers of 192 features."""
    config = transformers.ViTConfig(**SMALL, intermediate_size=768)
    return cpu_peer.Whole(transformers.ViTForImageClassification(config))


# A model, and the shape of its images or, of two dimensions, of its words.
TRAINING: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "unet": (UNet, (2, 3, 64, 64)),
    "resnet18": (ResNet18, (2, 3, 64, 64)),
    "bert": (bert, (2, 64)),
    "vit": (vit, (2, 3, 224, 224)),
    "mixture": (mixture, (8, 3, 32, 32)),
}


def time_first_step(model: str, arm: str) -> dict[str, float]:
    """Return wall and processor seconds of the first forward and backward, and runs of g++."""
    torch.manual_seed(0)
    make, shape = TRAINING[model]
    net = make().train()
    x = torch.randint(1000, shape) if len(shape) == 2 else torch.randn(shape)
    backend, options = ARMS[arm]
    if backend == "ipex":
        import ipex_inductor  # noqa: F401  # as its users may
    importlib.import_module("torch._inductor.compile_fx")  # as any first graph of a process does
    torch.compile(torch.sin, backend="aot_eager")(torch.ones(2))
    run, runs = subprocess.run, 0

    def counted(command: Any, *args: Any, **more: Any) -> Any:
        nonlocal runs
        runs += "-o" in command
        return run(command, *args, **more)

    subprocess.run = counted  # type: ignore[assignment]
    before, began = processors(), time.perf_counter()
    torch.compile(net, backend=backend, options=options)(x).square().mean().backward()
    first = time.perf_counter() - began
    own, others = (after - b for b, after in zip(before, processors(), strict=True))
    return {"first_s": first, "own_cpu_s": own, "compilers_cpu_s": others, "compiler_runs": runs}


def processors() -> tuple[float, float]:
    """Processor seconds of this process, and of those it has waited for."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    own, others = (each.ru_utime + each.ru_stime for each in used)
    return own, others


def time_first_calls(model: str, arm: str) -> dict[str, float]:
    """Return seconds of the first call, and the least and median milliseconds of later ones."""
    net, inputs = cpu_peer.make_model(model, torch.bfloat16, 1)
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


def measure_in_processes(model: str, arm: str, how: str, count: int = 1) -> list[dict[str, float]]:
    """Measure in processes one after the other, with caches of their own."""
    with tempfile.TemporaryDirectory() as folder:
        tmp = Path(folder) / "tmp"  # where torch keeps its own, headers too
        tmp.mkdir()
        env = {k: v for k, v in os.environ.items() if not k.startswith("TORCHINDUCTOR_CACHE")}
        env |= {"IPEX_HOME": folder, "TMPDIR": str(tmp)}
        command = [sys.executable, __file__, "--one", model, arm, how]
        said: list[dict[str, float]] = []
        for _ in range(count):
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1200)
            if done.returncode:
                raise RuntimeError(done.stderr)
            said.append(json.loads(done.stdout.splitlines()[-1]))
    return said


def main() -> None:
    """Measure in turns; a line a process, then medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices={*cpu_peer.MODELS, *TRAINING})
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--training", action="store_true", help="forward and backward")
    parser.add_argument("--warm", action="store_true", help="a second process behind each")
    parser.add_argument("--json", help="file for the lines")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        *which, how = options.one
        print(json.dumps({"timed": time_first_calls, "trained": time_first_step}[how](*which)))
        return
    options.threads = torch.get_num_threads()
    how, arms = ("trained", TRAINED) if options.training else ("timed", ARMS)
    models = options.models or (TRAINING if options.training else ["resnet50", "bert"])
    starts = ("cold", "warm")[: 1 + options.warm]
    found: dict[tuple[str, str, str], list[dict[str, float]]] = {}
    for _ in range(options.rounds):
        for model in models:
            for arm in arms:
                figures = measure_in_processes(model, arm, how, len(starts))
                load = round(os.getloadavg()[0], 1)
                for start, each in zip(starts, figures, strict=True):
                    found.setdefault((model, arm, start), []).append(each)
                    row = {"model": model, "arm": arm, "start": start}
                    append_row({**row, **each, "load": load}, options)
    for (model, arm, start), rows in found.items():
        medians = {name: statistics.median(each[name] for each in rows) for name in rows[0]}
        told = (f"{name} {value:.2f}" for name, value in medians.items())
        print(f"{model:12} {arm:20} {start}", *told)


if __name__ == "__main__":
    main()
