"""Compare optimizer steps on a CPU: ours, torch's fused and torch's foreach.

    python -m benchmarks optimizer [--params resnet50|bert] [--rounds N] [--sycl] [--json FILE]

Each round times one step of every candidate, in turns, on separate parameters. Prints medians and
minima of the rounds, in milliseconds, and the time of torch's fused step over ours. bf16 training
in full precision: our split weights, against fp32 masters with torch's fused step and a copy back.

With `--sycl`, ours are SYCL kernels on the CPU device, a stand-in for Intel GPUs. They have threads
of their own, so each step waits until those of the one before have stopped spinning.

Nothing is printed unless five steps of ours agree with torch's in fp64.
"""

import argparse
import functools
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW

from ipex_inductor.optim import Lamb, Lars, attach_master_weights, fuse_step
from ipex_inductor.optim.launching import launch_groups_cpu
from ipex_inductor.target import device
from ipex_inductor.templates.sycl.step import step_function

STEPS = {
    "AdamW": (AdamW, {}),
    "Adam": (Adam, {}),
    "SGD": (SGD, {"lr": 1e-3, "momentum": 0.9}),
    "Adagrad": (Adagrad, {}),
    "Lamb": (Lamb, {}),
    "Lars": (Lars, {"lr": 1e-3, "momentum": 0.9}),
}
OURS_ALONE = ("Lamb", "Lars")  # torch has none: against our own unfused step
Step = Callable[[], None]
TURNING = 0.01  # seconds that OpenMP's threads may, after a step, on cores that others want


def resnet50() -> Iterator[tuple[int, ...]]:
    """Return the shapes of ResNet-50's 161 parameters."""
    yield from ((64, 3, 7, 7), (64,), (64,))
    entering = 64
    for width, depth in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for number in range(depth):
            for shape in ((width, entering, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)):
                yield from (shape, shape[:1], shape[:1])
            if not number:
                yield from ((4 * width, entering, 1, 1), (4 * width,), (4 * width,))
            entering = 4 * width
    yield from ((1000, 2048), (1000,))


def bert() -> Iterator[tuple[int, ...]]:
    """Return the shapes of BERT-base's 199 parameters."""
    yield from ((30522, 768), (512, 768), (2, 768), (768,), (768,))
    for _ in range(12):
        yield from [(768, 768), (768,)] * 4
        yield from ((768,), (768,), (3072, 768), (3072,), (768, 3072), (768,), (768,), (768,))
    yield from ((768, 768), (768,))


MODELS = {"resnet50": resnet50, "bert": bert}


def make_parameters(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> list[nn.Parameter]:
    """Return parameters of these shapes with a gradient each."""
    params = [nn.Parameter((0.1 * torch.randn(shape)).to(dtype)) for shape in shapes]
    for param in params:
        param.grad = 0.01 * torch.randn_like(param)
    return params


def candidates(name: str, shapes: list[tuple[int, ...]], dtype: torch.dtype) -> dict[str, Step]:
    """Return the candidates of one optimizer on plain parameters."""
    kind, options = STEPS[name]
    peers = {"unfused": {}} if name in OURS_ALONE else {"foreach": {"foreach": True}}
    if name not in OURS_ALONE:
        peers["torch fused"] = {"fused": True}
    ours = kind(make_parameters(shapes, dtype), **options)
    assert fuse_step(ours) is None
    theirs = {
        n: kind(make_parameters(shapes, dtype), **options, **more).step for n, more in peers.items()
    }
    return {**theirs, "ours": ours.step}


def low_precision_candidates(name: str, shapes: list[tuple[int, ...]]) -> dict[str, Step]:
    """Return the candidates of one optimizer for bf16 parameters in full precision."""
    kind, options = STEPS[name]
    model = nn.ParameterList(make_parameters(shapes, torch.float32))
    ours = kind(model.parameters(), **options)
    assert fuse_step(ours) is None
    attach_master_weights(model, ours, list(model), torch.bfloat16, split=True)
    for param in model:
        param.grad = (0.01 * torch.randn(param.shape)).bfloat16()
    low = make_parameters(shapes, torch.bfloat16)
    masters = [nn.Parameter(param.detach().float()) for param in low]
    theirs = kind(masters, **options, fused=True)

    def by_hand() -> None:
        for master, param in zip(masters, low, strict=True):
            master.grad = param.grad.float()
        theirs.step()
        with torch.no_grad():
            torch._foreach_copy_(low, masters)

    return {"torch fused on masters": by_hand, "ours, split": ours.step}


def every(shapes: list[tuple[int, ...]]) -> Iterator[tuple[str, str, dict[str, Step]]]:
    """What is raced, in turn: the optimizer, how parameters are held, and the candidates."""
    for name in STEPS:
        for dtype in (torch.float32, torch.bfloat16):
            yield name, str(dtype)[6:], candidates(name, shapes, dtype)
    for name in ("AdamW", "SGD", "Adagrad"):
        yield name, "bf16, fp32 kept", low_precision_candidates(name, shapes)


def check(name: str) -> None:
    """Check five steps against torch's in fp64; fp32 within its rounding."""
    kind, options = STEPS[name]
    shapes = [(257, 33), (1,), (5, 3, 3, 3)]
    mine = make_parameters(shapes, torch.float32)
    exact = [nn.Parameter(param.detach().double()) for param in mine]
    ours, theirs = kind(mine, **options), kind(exact, **options)
    assert fuse_step(ours) is None
    for _ in range(5):
        for a, b in zip(mine, exact, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.double()
        ours.step()
        theirs.step()
    for a, b in zip(mine, exact, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-6)


def time_in_turns(
    steps: dict[str, Step], rounds: int, pause: float = 0.0
) -> dict[str, tuple[float, float]]:
    """Return median and minimum of each, in ms, each after a pause of some seconds."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 3):
        for name, step in steps.items():
            time.sleep(pause)
            began = time.perf_counter()
            step()
            if number >= 3:
                times[name].append(1e3 * (time.perf_counter() - began))
    return {name: (median(values), min(values)) for name, values in times.items()}


def main(params: str, rounds: int, sycl: bool, file: Path | None) -> None:
    """Check, race, print."""
    if sycl:
        launch_groups_cpu._library = functools.cache(lambda kernel, _: step_function(kernel))
    for name in STEPS:
        check(name)
    shapes = list(MODELS[params]())
    count = sum(torch.Size(shape).numel() for shape in shapes)
    print(f"{params}: {len(shapes)} tensors, {count / 1e6:.1f} M parameters; {device.current()}")
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; ms, median (minimum)")
    rows = []
    for name, form, steps in every(shapes):
        found = time_in_turns(steps, rounds, TURNING * sycl)
        *_, peer, ours = found.values()
        cells = "  ".join(f"{n} {m:.2f} ({least:.2f})" for n, (m, least) in found.items())
        ratio = f"{peer[0] / ours[0]:.2f} ({peer[1] / ours[1]:.2f})"
        print(f"{name:8} {form:16} {cells}   x{ratio}", flush=True)
        rows.append((name, form, found))
    if file:
        with file.open("a") as out:
            for name, form, found in rows:
                row = {
                    "date": time.strftime("%Y-%m-%d"),
                    "device": str(device.current()),
                    "torch": torch.__version__,
                    "python": platform.python_version(),
                    "command": " ".join(["python", "-m", "benchmarks", "optimizer", *sys.argv[1:]]),
                    "parameters": params,
                    "optimizer": name,
                    "form": form,
                    "median and minimum, ms": found,
                }
                out.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--params", choices=MODELS, default="resnet50")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--sycl", action="store_true")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    main(given.params, given.rounds, given.sycl, given.json)
