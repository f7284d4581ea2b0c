"""Compare peak memory of training: split bf16 weights, bf16 with fp32 masters, and fp32.

    python -m benchmarks split_memory [--mib SIZE] [--device cuda]

A stack of linear layers with SIZE MiB of fp32 weights (default 512), SGD with momentum. Each
variant runs in a process of its own: three steps of forward, backward and optimizer. Prints bytes a
parameter: weights and optimizer state between steps (counted), and the peak (resident memory on a
CPU, the allocator's on a GPU), minus that of a process without a model. On a CPU every tensor is
mapped separately, so that freed memory leaves the process at once.

Nothing is printed unless training with split weights gives the bits of fp32 masters.
"""

import argparse
import copy
import gc
import os
import resource
import subprocess
import sys

import torch
from torch import nn
from torch.optim import SGD

from ipex_inductor.optim import attach_master_weights

WIDTH, BATCH = 1024, 8
WAYS = {"fp32": None, "bf16 and fp32 master": False, "bf16 split": True}


def main(mib: int, device: str) -> None:
    """Check, measure each way, print."""
    check()
    layers = mib * 2**20 // (4 * WIDTH * WIDTH)
    params = layers * WIDTH * WIDTH
    empty, _ = measure_process("none", 0, device)
    print(f"{params / 1e6:.0f} M parameters, SGD with momentum, {device}; bytes a parameter")
    print(f"{'':24} {'held':>8} {'peak':>8}")
    rows = {way: measure_process(way, layers, device) for way in WAYS}
    for way, (peak, held) in rows.items():
        print(f"{way:24} {held / params:8.2f} {(peak - empty) / params:8.2f}")
    saved = [a - b for a, b in zip(rows["bf16 and fp32 master"], rows["bf16 split"], strict=True)]
    print(f"{'saved by the split':24} {saved[1] / params:8.2f} {saved[0] / params:8.2f}")


def measure_process(way: str, layers: int, device: str) -> tuple[int, int]:
    """Return peak and held bytes of one variant, in a process of its own."""
    command = [sys.executable, __file__, "--run", way, "--layers", str(layers), "--device", device]
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    output = subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout
    peak, held = map(int, output.split())
    return peak, held


def run_steps(way: str, layers: int, device: str) -> None:
    """Run three steps; print peak and held bytes."""
    torch.set_num_threads(1)
    model = make_stack(max(layers, 1) if way != "none" else 0, device)
    optimizer = SGD([*model.parameters()] or [nn.Parameter(torch.ones(1))], 1e-3, momentum=0.9)
    cast_weights(model, optimizer, WAYS.get(way))
    gc.collect()
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    x = torch.randn(BATCH, WIDTH, device=device)
    for _ in range(3):
        optimizer.zero_grad()
        if layers:
            with torch.autocast(device, torch.bfloat16, enabled=way != "fp32"):
                model(x).float().square().mean().backward()
        optimizer.step()
    print(peak_bytes(device), held_bytes(model, optimizer))


def make_stack(layers: int, device: str) -> nn.Sequential:
    """Return linear layers, made one by one."""
    return nn.Sequential(
        *(nn.Linear(WIDTH, WIDTH, bias=False, device=device) for _ in range(layers))
    )


def cast_weights(model: nn.Module, optimizer: SGD, split: bool | None) -> None:
    """Cast as the variant says; None is fp32."""
    if split is not None:
        attach_master_weights(model, optimizer, model.parameters(), torch.bfloat16, split=split)


def peak_bytes(device: str) -> int:
    """Return the largest memory of this process so far."""
    if device == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return torch.cuda.max_memory_allocated()


def held_bytes(model: nn.Module, optimizer: SGD) -> int:
    """Return bytes of weights, lower halves or masters, and optimizer state."""
    optimizer.zero_grad()
    tensors = list(model.parameters())
    for module in model.modules():
        for weight in vars(module).get("_ipex_weights", {}).values():
            tensors.append(weight.rest)
    tensors += [v for own in optimizer.state.values() for v in own.values()]
    storages = [t.untyped_storage() for t in tensors if isinstance(t, torch.Tensor)]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


def check() -> None:
    """Check that both variants train equal fp32 weights from equal gradients."""
    torch.manual_seed(0)
    split = make_stack(2, "cpu")
    whole = copy.deepcopy(split)
    optimizers = [SGD(m.parameters(), 0.1, momentum=0.9) for m in (split, whole)]
    cast_weights(split, optimizers[0], True)
    cast_weights(whole, optimizers[1], False)
    for _ in range(3):
        for p, q in zip(split.parameters(), whole.parameters(), strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    shown = whole.state_dict()
    assert all(torch.equal(shown[name], value) for name, value in split.state_dict().items())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--run")
    parser.add_argument("--layers", type=int, default=0)
    given = parser.parse_args()
    if given.run:
        run_steps(given.run, given.layers, given.device)
    else:
        main(given.mib, given.device)
