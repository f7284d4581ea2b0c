"""Compare linear layers and Llama-like layers in FP8 on a GPU with bf16, both by backend `ipex`.

    python -m benchmarks fp8_gpu [--cases linear layer prefill] [--peers] [--kernels] [--calls N]
        [--json FILE]

`linear` is one layer forward and backward on 8192 rows: 4096 to 14336 and back, and 4096 to 4096.
`layer` is a training step of a decoder layer of Llama-3-8B's sizes without its optimizer, on 4 x
2048 tokens. `prefill` is inference of 8 such layers. Milliseconds are the median of 15 calls
between events, quantization and updates of scales included; `host_ms` is what the host takes to
launch a call. Memory is the peak above the model and
its inputs. `--peers` adds plain Inductor in bf16. The error is relative to the result in bf16.
"""

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from common.command import command_line
from ipex_inductor.quantization.fp8 import DelayedScaling, fp8_autocast, prepare_fp8

ROWS, HIDDEN, INNER, HEADS, GROUPS, LAYERS = 8192, 4096, 14336, 32, 8, 8
LINEAR = ((HIDDEN, INNER), (INNER, HIDDEN), (HIDDEN, HIDDEN))
CALLS, KERNELS = 15, 40
RECIPE = DelayedScaling(amax_history_len=16)


class Attention(nn.Module):
    """Causal attention with rotary embedding and grouped keys."""

    def __init__(self) -> None:
        super().__init__()
        self.size = HIDDEN // HEADS
        self.query = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.key = nn.Linear(HIDDEN, GROUPS * self.size, bias=False)
        self.value = nn.Linear(HIDDEN, GROUPS * self.size, bias=False)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the attention of x [B, S, HIDDEN]; cos and sin are [S, size]."""
        batch, length, _ = x.shape

        def split(y: Tensor) -> Tensor:
            return y.view(batch, length, -1, self.size).transpose(1, 2)

        def rotate(y: Tensor) -> Tensor:
            left, right = y.chunk(2, -1)
            return y * cos + torch.cat([-right, left], -1) * sin

        query, key = rotate(split(self.query(x))), rotate(split(self.key(x)))
        value = split(self.value(x))
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        result: Tensor = self.out(y.transpose(1, 2).reshape(x.shape))
        return result


class Layer(nn.Module):
    """A decoder layer of Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(HIDDEN) for _ in range(2))
        self.attention = Attention()
        self.gate = nn.Linear(HIDDEN, INNER, bias=False)
        self.up = nn.Linear(HIDDEN, INNER, bias=False)
        self.down = nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the layer's result for x [B, S, HIDDEN]."""
        x = x + self.attention(self.norms[0](x), cos, sin)
        y = self.norms[1](x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Layers(nn.Module):
    """Decoder layers, one after the other, with rotary embedding."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        angles = torch.arange(2048)[:, None] * 500000 ** -torch.linspace(0, 1, HIDDEN // HEADS // 2)
        self.register_buffer("angles", torch.cat([angles, angles], -1))

    def forward(self, x: Tensor) -> Tensor:
        """Return hidden states of x [B, S, HIDDEN]."""
        cos, sin = self.angles.cos().to(x.dtype), self.angles.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return x


def make_case(name: str) -> list[tuple[str, nn.Module, Tensor, bool]]:
    """Return the name, model, input and whether it is trained, of each row of a case."""
    make: Callable[..., Tensor] = torch.randn
    kinds: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    if name == "linear":
        return [
            (f"linear {k} to {n}", nn.Linear(k, n, **kinds), make(ROWS, k, **kinds), True)
            for k, n in LINEAR
        ]
    layers = LAYERS if name == "prefill" else 1
    with torch.device("cuda"):
        model = Layers(layers).bfloat16()
    return [(f"{name} of {layers}", model, make(4, 2048, HIDDEN, **kinds), name != "prefill")]


class Measured(NamedTuple):
    """Milliseconds of a call and of its host, and megabytes of its peak."""

    milliseconds: float
    host: float
    megabytes: float


def measure(call: Callable[[], object], calls: int) -> Measured:
    """Return what a call takes, and its peak above what was held before, of a number of calls."""
    for _ in range(4):
        call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held, times, host_times = torch.cuda.memory_allocated(), [], []
    for _ in range(calls):
        begin, end = torch.cuda.Event(True), torch.cuda.Event(True)
        started = time.perf_counter()
        begin.record()
        call()
        end.record()
        host_times.append(1e3 * (time.perf_counter() - started))
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    peak = (torch.cuda.max_memory_allocated() - held) / 2**20
    return Measured(statistics.median(times), statistics.median(host_times), peak)


def print_kernels(call: Callable[[], object]) -> None:
    """Print the kernels that take longest."""
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        call()
        torch.cuda.synchronize()
    events = sorted(trace.key_averages(), key=lambda event: -event.device_time_total)
    for event in events[:KERNELS]:
        print(f"  {event.device_time_total:9.1f} us {event.count:3d} x {event.key[:120]}")


def run_form(
    form: str, model: nn.Module, x: Tensor, trains: bool, kernels: bool, calls: int
) -> tuple[Tensor, Measured]:
    """Return the result of a form, and what it takes.

    Args:
        form: "fp8", "bf16", or "inductor" for bf16 by plain Inductor.
        model: in bf16.
        x: its input.
        trains: compute gradients too.
        kernels: print the kernels that take longest.
        calls: number of calls that are measured.
    """
    torch.compiler.reset()
    model = copy.deepcopy(model).train(trains)
    if form == "fp8":
        model = prepare_fp8(model)
    compiled = torch.compile(model, backend="inductor" if form == "inductor" else "ipex")
    gradient = torch.randn_like(model(x)) if trains else None
    x = x.clone().requires_grad_(trains)

    def forward() -> Tensor:
        with fp8_autocast(enabled=form == "fp8", fp8_recipe=RECIPE):
            result: Tensor = compiled(x)
        return result

    def step() -> None:
        with torch.set_grad_enabled(trains):
            y = forward()
            if gradient is not None:
                y.backward(gradient)
                model.zero_grad()
                x.grad = None

    measured = measure(step, calls)
    if kernels:
        print_kernels(step)
    with torch.no_grad():
        return forward(), measured


def main() -> None:
    """See the top of the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    cases = ("linear", "layer", "prefill")
    parser.add_argument("--cases", nargs="+", choices=cases, default=list(cases))
    parser.add_argument("--peers", action="store_true", help="plain Inductor in bf16 too")
    parser.add_argument("--kernels", action="store_true", help="print the kernels of FP8")
    parser.add_argument("--calls", type=int, default=CALLS, metavar="N", help="calls of each form")
    parser.add_argument("--json", metavar="FILE")
    given = parser.parse_args()
    forms = ("bf16", *["inductor"] * given.peers, "fp8")
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    for case in given.cases:
        torch.manual_seed(0)
        for name, model, x, trains in make_case(case):
            base, first = None, None
            for form in forms:
                kernels = given.kernels and form == "fp8"
                result, measured = run_form(form, model, x, trains, kernels, given.calls)
                base = result.float() if base is None else base
                first = first or measured.milliseconds
                row = {
                    "case": name,
                    "form": form,
                    "trains": trains,
                    "ms": round(measured.milliseconds, 3),
                    "host_ms": round(measured.host, 3),
                    "speed": round(first / measured.milliseconds, 3),
                    "peak_mb": round(measured.megabytes),
                    "error": round(float((result.float() - base).norm() / base.norm()), 4),
                    **about,
                    "date": datetime.now(UTC).date().isoformat(),
                    "command": command_line({"--json", given.json}),
                }
                print(json.dumps(row), flush=True)
                if given.json:
                    with open(given.json, "a") as file:
                        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
