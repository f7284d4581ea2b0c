"""Measure host time of one fused AdamW step of ResNet-50's 161 tensors on a GPU.

    python -m benchmarks optimizer_host [--rounds N] [--shards] [--json FILE]

In microseconds, medians and minima: gradients that stay in place, and new ones of a backward pass,
as after `zero_grad`; with warm caches, and with cold ones (64 MB are read between two steps). On a
GPU, torch's fused step stands beside it, in turns. Without one, the GPU code path runs on host
tensors with a stub driver: launches and copies are not included.
With `--shards` the parameters are DTensors, as in FSDP2, in a mesh of this process alone; torch's
step is then `foreach`, as it has no fused step for DTensors on a CPU.
"""

import argparse
import json
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import torch
from optimizer import resnet50
from torch import Tensor, nn
from torch.optim import AdamW

from ipex_inductor.aot_cache.key import pairs
from ipex_inductor.optim import FusedStep, fuse_step, planning
from ipex_inductor.optim.launching import launch_groups_cuda as batches
from ipex_inductor.target import device as target
from ipex_inductor.templates.build import cuda
from ipex_inductor.templates.build.cpp import load
from ipex_inductor.templates.optimizer.step_triton import signature

DRIVER = """
extern "C" int cuModuleLoadData(void**, const void*) { return 0; }
extern "C" int cuModuleGetFunction(void**, void*, const char*) { return 0; }
extern "C" int cuLaunchKernel(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                              unsigned, void*, void**, void**) { return 0; }
"""
COLD = 64 << 20  # bytes


class Here:
    """`On`: a stream of the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __enter__(self) -> int:
        return 0

    def __exit__(self, *raised: object) -> None:
        pass


class Sent:
    """As the other, but for the copy."""

    def __init__(self, device: torch.device) -> None:
        self._known = None

    def address(self, values, stream: int) -> int:
        """Where `values` are."""
        if self._known != values:
            self._known = values[:]
        return self._known.buffer_info()[0]


class Room:
    """As the other."""

    def __init__(self, held: Tensor) -> None:
        self._held, self._address, self._count = held, held.data_ptr(), len(held)

    def __len__(self) -> int:
        return self._count

    def address(self, stream: int) -> int:
        """Where it is."""
        return self._address


def stub_driver() -> None:
    """Build plans for a GPU whose driver does nothing."""
    driver = load(lambda: DRIVER, pairs({"template": "no driver"}), portable=True)
    cuda._driver = lambda: driver

    def batch(made, kernel, columns, group, step, first, looks):
        far = planning.count_steps_before(step, first)
        return planning._find_batch(
            made, batches.CudaBatch, kernel, columns[0].device, True, group, far
        )

    def kernel_of(kernel, device, aligned, name):
        kinds = [*signature(kernel).values()]
        meta = {"name": name, "signature": kinds, "num_warps": 8, "shared": 0}
        return cuda.Kernel(SimpleNamespace(blob=b"", meta=meta))

    planning._batch = batch
    batches.kernel_of, batches.On, batches.Sent, batches.Room = kernel_of, Here, Sent, Room
    batches.stream_on = lambda device: 0
    torch.cuda.is_current_stream_capturing = lambda: False
    batches.chunks_of = lambda blocks, device: torch.zeros(len(blocks), 2, dtype=torch.int32)


def keep_whole(tensor: Tensor) -> Tensor:
    """Return the tensor unchanged."""
    return tensor


def make_sharder(device: str) -> Callable[[Tensor], Tensor]:
    """Return a function that shards a tensor in a mesh of this process."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    store = f"file://{tempfile.mkdtemp()}/store"
    backend = "nccl" if device == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, init_method=store, rank=0, world_size=1)
    mesh = init_device_mesh(device, (1,))
    return lambda tensor: distribute_tensor(tensor, mesh, [Shard(0)])


def steps(
    device: str, cut: Callable[[Tensor], Tensor]
) -> dict[str, tuple[list[nn.Parameter], Callable[[], object]]]:
    """Parameters of each candidate, and its step."""
    made = {}
    names = ["ours", "ours, clipped", "torch fused"][: 3 if device == "cuda" else 1]
    for name in [*names, *["torch foreach"] * (cut is not keep_whole)]:
        # On the host the addresses count, not what is there.
        shapes = (s if device == "cuda" else tuple(min(n, 8) for n in s) for s in resnet50())
        params = [nn.Parameter(cut(torch.full(s, 0.1, device=device))) for s in shapes]
        flag = name.removeprefix("torch ")
        optimizer = AdamW(params, **({flag: True} if flag != name else {}))
        if name == "ours":
            assert fuse_step(optimizer) is None
        elif name == "ours, clipped":
            FusedStep(optimizer, clip_norm=1.0)
        made[name] = params, optimizer.step
    return made


def backward(params: list[nn.Parameter]) -> None:
    """New gradients, which autograd alone has seen."""
    for param in params:
        param.grad = None
    made = torch._foreach_mul(params, 0.01)
    torch.autograd.backward(made, [torch.ones_like(each) for each in made])


def measure(
    device: str, cut: Callable[[Tensor], Tensor], anew: bool, cold: bool, rounds: int
) -> dict[str, tuple[float, float]]:
    """Time the steps in turns and print a row."""
    far = torch.zeros(COLD // 8, dtype=torch.int64)
    candidates = steps(device, cut)
    for params, _ in candidates.values():
        backward(params)
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for number in range(rounds + 10):
        for name, (params, step) in candidates.items():
            kept = [p.grad for p in params]  # or new ones might lie where they lay
            if anew:
                backward(params)
            del kept
            if cold:
                far.sum()
            if device == "cuda":
                torch.cuda.synchronize()
            began = time.perf_counter()
            step()
            if number >= 10:
                times[name].append(1e6 * (time.perf_counter() - began))
    return {name: (median(each), min(each)) for name, each in times.items()}


def main(rounds: int, shards: bool, file: Path | None) -> None:
    """Race, print."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cut = make_sharder(device) if shards else keep_whole
    if device == "cpu":
        stub_driver()
    torch.set_num_threads(1)
    print(
        f"{target.current(torch.device(device))}, torch {torch.__version__}; us, median (minimum)"
    )
    for anew in (False, True):
        for cold in (False, True):
            found = measure(device, cut, anew, cold, rounds)
            form = f"gradients {'anew' if anew else 'kept'}, caches {'cold' if cold else 'warm'}"
            cells = "  ".join(f"{n} {m:.0f} ({least:.0f})" for n, (m, least) in found.items())
            print(f"{form:27} {cells}", flush=True)
            if file:
                row = {
                    "date": time.strftime("%Y-%m-%d"),
                    "device": str(target.current(torch.device(device))),
                    "torch": torch.__version__,
                    "python": platform.python_version(),
                    "command": " ".join(
                        ["python", "-m", "benchmarks", "optimizer_host", *sys.argv[1:]]
                    ),
                    "form": form,
                    "median and minimum, us": found,
                }
                with file.open("a") as out:
                    out.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--shards", action="store_true")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    main(given.rounds, given.shards, given.json)
