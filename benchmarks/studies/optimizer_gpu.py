"""Compare optimizer steps on one GPU: ours, torch's fused, compiled and foreach.

    python -m benchmarks optimizer_gpu [--rounds N] [--only WORD] [--tiles] [--json FILE]

Prints for each candidate, in turns, the time of the device (between events on a full queue, so
without the host) and of the host alone; medians, in milliseconds. Beside them stands the bandwidth
of the bytes that a step must move, as a share of a copy's bandwidth in the same run. `compiled` is
`optimizer.step` by Inductor with an empty cache; its first step is given in seconds.

`--only` selects rows by a word: a list, an optimizer, a form. `--tiles` tries other blocks and
warps of ours instead. The last row is the first step of a fresh process: with an empty kernel
cache, and from a filled one.
"""

import argparse
import gc
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from optimizer import MODELS, STEPS
from torch import nn

from ipex_inductor.optim import FusedStep, GradScaler, attach_master_weights, fuse_step, norms
from ipex_inductor.optim.launching import launch_groups_cuda
from ipex_inductor.target import device as target
from ipex_inductor.templates.optimizer import step_cuda

Step = Callable[[], object]
# Bytes of a state or a gradient, as shares of the parameter's: read and written, or read alone.
STATES = {"AdamW": 2, "SGD": 1, "Adagrad": 1}
TWICE = {"Lamb": 40, "Lars": 28}  # bytes a parameter, of two passes
TILES = ((512, 2), (512, 4), (1024, 2), (1024, 4), (1024, 8), (2048, 4), (2048, 8), (4096, 8))


def llama(vocabulary: int, width: int, layers: int, keys: int, hidden: int) -> Iterator[tuple]:
    """Return the shapes of a Llama's parameters."""
    yield (vocabulary, width)
    for _ in range(layers):
        yield from ((width, width), (keys, width), (keys, width), (width, width))
        yield from ((hidden, width), (hidden, width), (width, hidden), (width,), (width,))
    yield from ((width,), (vocabulary, width))


def vit_l() -> Iterator[tuple]:
    """Return the shapes of ViT-L/16's parameters."""
    yield from ((1, 1, 1024), (1, 197, 1024), (1024, 3, 16, 16), (1024,))
    for _ in range(24):
        yield from ((1024,), (1024,), (3072, 1024), (3072,), (1024, 1024), (1024,))
        yield from ((1024,), (1024,), (4096, 1024), (4096,), (1024, 4096), (1024,))
    yield from ((1024,), (1024,), (1000, 1024), (1000,))


LISTS = {
    "llama-1b": lambda: llama(32000, 2048, 22, 256, 5632),
    "resnet50": MODELS["resnet50"],
    "vit-l": vit_l,
    "llama-8b": lambda: llama(128256, 4096, 32, 1024, 14336),
}
FORMS = ("fp32", "bf16")
OURS = ("ours", "ours, fused=True")
CASES = [
    *(("llama-1b", name, form) for name in ("AdamW", "SGD", "Adagrad") for form in FORMS),
    *(("llama-1b", name, "fp32") for name in TWICE),
    ("llama-1b", "AdamW", "around"),
    *(("llama-1b", name, "split") for name in ("AdamW", "SGD")),
    *(("resnet50", name, "fp32") for name in ("AdamW", "SGD")),
    ("resnet50", "AdamW", "bf16"),
    ("vit-l", "AdamW", "fp32"),
    ("llama-8b", "AdamW", "bf16"),
]


def params(name: str, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Return parameters with a gradient each."""
    made = [nn.Parameter(torch.full(s, 0.1, device="cuda", dtype=dtype)) for s in LISTS[name]()]
    for param in made:
        param.grad = torch.full_like(param, 0.01)
    return made


def bytes_moved(optimizer: str, form: str) -> int:
    """Return bytes a parameter: it and its states read and written, its gradient read.

    Lamb reads all but the gradient twice, Lars the parameter and the gradient. Around a step,
    gradients are read for their norm, read again, and zeroed.
    """
    if optimizer in TWICE:
        return TWICE[optimizer]
    if form == "around":
        return 36
    size = {"fp32": 4, "bf16": 2, "split": 2}[form]
    state = 4 if form == "split" else size
    return 2 * size + 2 * STATES[optimizer] * state + size + (4 if form == "split" else 0)


def candidates(name: str, optimizer: str, form: str) -> Iterator[tuple[str, Callable[[], Step]]]:
    """Return functions that make the step of each candidate."""
    kind, options = STEPS[optimizer]
    if form == "around":
        yield "torch, one after the other", lambda: separate(kind(params(name), fused=True))
        yield "ours, torch's look", lambda: around(kind(params(name), fused=True))
        yield "ours", lambda: scaled(kind(params(name), fused=True))
        return
    if optimizer in TWICE:
        yield "ours, unfused", lambda: kind(params(name), **options).step
        yield "ours", lambda: ours(kind(params(name), **options))
        return
    if form != "split":
        dtype = torch.float32 if form == "fp32" else torch.bfloat16
        yield "foreach", lambda: kind(params(name, dtype), **options, foreach=True).step
        if optimizer != "Adagrad":  # torch 2.11 has no fused one for GPUs
            yield "torch fused", lambda: kind(params(name, dtype), **options, fused=True).step
        yield "compiled", lambda: compile_step(kind(params(name, dtype), **options, foreach=True))
        yield "ours", lambda: ours(kind(params(name, dtype), **options))
        if optimizer == "AdamW":
            yield "ours, fused=True", lambda: ours(kind(params(name, dtype), **options, fused=True))
        return

    def by_hand() -> Step:
        low = params(name, torch.bfloat16)
        masters = [nn.Parameter(p.detach().float()) for p in low]
        theirs = kind(masters, **options, fused=True)

        def step() -> None:
            for master, param in zip(masters, low, strict=True):
                master.grad = param.grad.float()
            theirs.step()
            with torch.no_grad():
                torch._foreach_copy_(low, masters)

        return step

    def split() -> Step:
        model = nn.ParameterList(params(name, torch.float32))
        optimizer = kind(model.parameters(), **options)
        step = ours(optimizer)
        attach_master_weights(model, optimizer, list(model), torch.bfloat16, split=True)
        for param in model:
            param.grad = torch.full_like(param, 0.01, dtype=torch.bfloat16)
        return step

    yield "torch fused on masters", by_hand
    yield "ours", split


def separate(optimizer) -> Step:
    """Unscaled, clipped, stepped, zeroed."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    found, inverse = (torch.full((), value, device="cuda") for value in (0.0, 1.0))

    def step() -> None:
        torch._amp_foreach_non_finite_check_and_unscale_([p.grad for p in held], found, inverse)
        nn.utils.clip_grad_norm_(held, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return step


def around(optimizer) -> Step:
    """The same by ours; torch's GradScaler looks for what is not finite itself, here too."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    fused = FusedStep(optimizer, clip_norm=1.0, zero_grad=True)
    optimizer.found_inf, optimizer.grad_scale = (
        torch.full((), value, device="cuda") for value in (0.0, 1.0)
    )
    one = torch.ones((), device="cuda")

    def step() -> None:
        grads = [p.grad for p in held]
        torch._amp_foreach_non_finite_check_and_unscale_(grads, optimizer.found_inf, one)
        fused()

    return step


def scaled(optimizer) -> Step:
    """The same by ours and our GradScaler, with its update."""
    fused = FusedStep(optimizer, clip_norm=1.0, zero_grad=True)
    scaler = GradScaler(init_scale=1.0, growth_interval=1 << 30)
    scaler.scale(torch.ones((), device="cuda"))

    def step() -> None:
        scaler.step(fused.optimizer)
        scaler.update()

    return step


def ours(optimizer) -> Step:
    """Its step, by our kernels."""
    assert (reason := fuse_step(optimizer)) is None, reason
    return optimizer.step


def compile_step(optimizer) -> Step:
    """Return the step by Inductor after its first, and the first step's seconds."""
    torch._dynamo.reset()
    step = torch.compile(optimizer.step)
    began = time.perf_counter()
    step()
    torch.cuda.synchronize()
    step.first = round(time.perf_counter() - began, 1)
    print(f"  Inductor's first step {step.first} s", flush=True)
    return step


def time_steps(steps: dict[str, Step], rounds: int) -> dict[str, tuple[float, float]]:
    """Return medians of device and host, in ms."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for number in range(rounds + 3):
        for name, step in steps.items():
            torch.cuda.synchronize()
            torch.cuda._sleep(8_000_000)  # cycles, some 4 ms: longer than any host here takes
            begin.record()
            began = time.perf_counter()
            step()
            host = time.perf_counter() - began
            end.record()
            end.synchronize()
            if number >= 3:
                times[name].append((begin.elapsed_time(end), 1e3 * host))
    return {n: tuple(median(each) for each in zip(*v, strict=True)) for n, v in times.items()}


def copy_bandwidth() -> float:
    """Return bytes that a copy reads and writes a second."""
    source = torch.empty(1 << 32, dtype=torch.uint8, device="cuda")
    target_ = torch.empty_like(source)
    (found,) = time_steps({"copy": lambda: target_.copy_(source)}, 10).values()
    return 2 * len(source) / (1e-3 * found[0])


def measure_case(name: str, optimizer: str, form: str, rounds: int, copied: float) -> dict:
    """Return the row of one case."""
    count = sum(torch.Size(shape).numel() for shape in LISTS[name]())
    makers = dict(candidates(name, optimizer, form))
    together = count < 4e9
    found, first = {}, {}
    for chosen in [list(makers)] if together else [[n] for n in makers]:
        steps = {n: makers[n]() for n in chosen}
        first |= {n: step.first for n, step in steps.items() if hasattr(step, "first")}
        found |= time_steps(steps, rounds)
        del steps  # and the memory of these parameters, before there are others
        gc.collect()  # an optimizer is in a cycle with its step
        torch.cuda.empty_cache()
    share = {
        n: count * bytes_moved(optimizer, form) / (1e-3 * t[0]) / copied for n, t in found.items()
    }
    cells = "  ".join(
        f"{n} {device:.3f}/{host:.3f} ({share[n]:.1%})" for n, (device, host) in found.items()
    )
    print(f"{name:9} {optimizer:8} {form:6} {cells}", flush=True)
    return {
        "parameters": name,
        "optimizer": optimizer,
        "form": form,
        "device and host, ms": found,
        "share of the copy's bandwidth": share,
        "first step of the compiled one, s": first,
    }


def try_tiles(rounds: int, copied: float) -> None:
    """Time blocks and warps of our step; a chunk keeps its number of blocks (`blocks_of`)."""
    for optimizer, form in (
        *(("SGD", form) for form in ("bf16", "fp32", "split")),
        *(("AdamW", form) for form in ("bf16", "fp32", "split")),
        *((name, "fp32") for name in TWICE),
    ):
        count = sum(torch.Size(shape).numel() for shape in LISTS["llama-1b"]())
        for tile in TILES:
            step_cuda.TILES = ((math.inf, *tile),)
            step_cuda.WITH_NORMS = ((math.inf, *tile),)
            launch_groups_cuda._kernel_of.cache_clear()
            makers = dict(candidates("llama-1b", optimizer, form))
            found = time_steps({n: makers[n]() for n in makers if n in OURS}, rounds)
            gc.collect()  # an optimizer is in a cycle with its step
            torch.cuda.empty_cache()
            shares = (
                f"{n} {count * bytes_moved(optimizer, form) / (1e-3 * device) / copied:.1%}"
                for n, (device, _) in found.items()
            )
            print(f"{optimizer} {form} {tile}: {'  '.join(shares)}", flush=True)


FIRST = """
import sys, time
sys.path.insert(0, {here!r})
import torch
import optimizer_gpu as mine
from optimizer import STEPS
kind, options = STEPS["AdamW"]
made = kind(mine.params("resnet50", torch.float32), **options)
if {ours}:
    mine.ours(made)
torch.cuda.synchronize()
began = time.perf_counter()
made.step()
torch.cuda.synchronize()
print(time.perf_counter() - began)
"""


def first_steps() -> dict[str, float]:
    """Return seconds of the first step of ResNet-50's AdamW in a fresh process."""
    found = {}
    with tempfile.TemporaryDirectory() as home:
        for told, own in (("cold", 1), ("from the cache", 1), ("torch foreach", 0)):
            code = FIRST.format(here=str(Path(__file__).parent), ours=own)
            environment = {**os.environ, "IPEX_HOME": home}
            said = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
            found[told] = float(said)
    return found


def try_norm_tiles(rounds: int, copied: float) -> None:
    """Time blocks, turns and warps of the norm of gradients."""
    count = sum(torch.Size(shape).numel() for shape in LISTS["llama-1b"]())
    for dtype in (torch.float32, torch.bfloat16):
        grads = [p.grad for p in params("llama-1b", dtype)]
        addresses = array("q", (grad.data_ptr() for grad in grads))
        found = torch.zeros((), device="cuda")
        for block, turns, warps in product((1024, 2048, 4096), (4, 8, 16), (4, 8)):
            norms.BLOCK, norms.TURNS, norms.WARPS = block, turns, warps
            norms.CHUNK = block * turns
            norms.ROWS = 32 * warps
            norms._parts_or_why.cache_clear()
            reading = norms.Reading(grads, grads[0].device)
            clipped = reading.allocate_clip()
            steps = {
                "norm and look": partial(
                    reading.run, addresses, 1.0, None, clipped, found, True, None
                ),
                "look": partial(reading.run, addresses, None, None, None, found, True, None),
                "torch's norm": partial(torch.nn.utils.get_total_norm, grads),
            }
            cells = (
                f"{n} {count * dtype.itemsize / (1e-3 * t[0]) / copied:.1%}"
                for n, t in time_steps(steps, rounds).items()
            )
            print(f"{dtype} {block} x {turns}, {warps} warps: {'  '.join(cells)}", flush=True)


def main(rounds: int, only_tiles: bool, file: Path | None, only: str) -> None:
    """Race, print."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()
    copied = copy_bandwidth()
    torch.cuda.empty_cache()
    print(f"{target.current('cuda')}, torch {torch.__version__}; a copy: {copied / 1e12:.3f} TB/s")
    print("median ms of the device / of the host (share of the copy's bandwidth)")
    if only_tiles:
        try_norm_tiles(rounds, copied)
        try_tiles(rounds, copied)
        return
    words = [word for word in sys.argv[1:] if word not in ("--json", str(file))]
    said = {
        "date": time.strftime("%Y-%m-%d"),
        "device": str(target.current("cuda")),
        "torch": torch.__version__,
        "command": " ".join(["python", "-m", "benchmarks", "optimizer_gpu", *words]),
        "copy, TB/s": copied / 1e12,
    }

    def keep(row: dict[str, Any]) -> None:
        if file:
            with file.open("a") as out:
                out.write(json.dumps({**said, **row}) + "\n")

    for case in CASES:
        if not only or only in case:
            keep(measure_case(*case, rounds, copied))
    first = first_steps()
    print("first step, ResNet-50, s: " + ", ".join(f"{n} {t:.3f}" for n, t in first.items()))
    keep({"first step, s": first})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="")
    parser.add_argument("--tiles", action="store_true")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    main(given.rounds, given.tiles, given.json, given.only)
