"""Measure training steps with and without fused GEMM rules on plain weights.

    python -m benchmarks training_rules [--json FILE] [--rounds N] [CASE ...]

Every case is LAYERS layers of one GEMM with one epilogue, compiled twice: with every rule of
`passes/training/training.py`, also those that are off by default, and with none. Loss and gradients
must agree before a time is printed. Minima of interleaved rounds, in milliseconds a step of one
thread's processor time, which depends least on other load.
"""

import argparse
import copy
import datetime
import json
import platform
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

from ipex_inductor import compat
from ipex_inductor.passes.training import training

LAYERS = 3
# Of a gradient as a whole: one relu of a million that switches, near 0, moves it by some 2e-3.
TOLERANCE = {torch.float32: 1e-2, torch.bfloat16: 5e-2}

EPILOGUES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "relu": lambda y, x: F.relu(y),
    "sigmoid": lambda y, x: torch.sigmoid(y),
    "tanh": lambda y, x: torch.tanh(y),
    "gelu": lambda y, x: F.gelu(y),
    "add": lambda y, x: y + x,
    "add+relu": lambda y, x: F.relu(y + x),
    "add+layer_norm": lambda y, x: F.layer_norm(y + x, y.shape[-1:]),
}
SHAPES = {
    "linear": ((256, 512), (8, 128, 768)),
    "conv": ((4, 64, 56, 56), (8, 128, 28, 28)),
}
CASES = {
    "linear": ("relu", "tanh", "sigmoid", "add", "add+relu", "add+layer_norm"),
    "conv": ("relu", "add+relu", "add", "sigmoid"),
    "frozen linear": ("gelu",),  # below layers that are trained: no backward reads the product
}


class Layers(nn.Module):
    """LAYERS products of `width` to `width` features, each with the epilogue."""

    def __init__(self, product: str, epilogue: str, width: int) -> None:
        super().__init__()
        make = (
            partial(nn.Linear, width, width)
            if product.endswith("linear")
            else partial(nn.Conv2d, width, width, 3, padding=1)
        )
        self.layers = nn.ModuleList(make() for _ in range(LAYERS))
        self.epilogue = EPILOGUES[epilogue]
        if product.startswith("frozen"):
            for layer in self.layers[:-1]:
                layer.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., width] or [B, width, H, W], and the same back."""
        for layer in self.layers:
            x = self.epilogue(layer(x), x)
        return x


def cases() -> Iterator[tuple[str, str, tuple[int, ...], torch.dtype]]:
    """Yield GEMM, epilogue, shape and dtype."""
    for product, epilogues in CASES.items():
        for epilogue in epilogues:
            for shape in SHAPES[product.split()[-1]]:
                for dtype in TOLERANCE:
                    yield product, epilogue, shape, dtype


def step(model: Callable[[Tensor], Tensor], x: Tensor, of: nn.Module) -> list[Tensor]:
    """Return the loss, and the gradients of the parameters of `of`."""
    trained = [p for p in of.parameters() if p.requires_grad]
    for p in trained:
        p.grad = None
    loss = (model(x) - x).float().square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad for p in trained)]


def measure(
    product: str, epilogue: str, shape: tuple[int, ...], dtype: torch.dtype, rounds: int
) -> list[float]:
    """Milliseconds of a step: Inductor's own, with the fused product."""
    torch.compiler.reset()
    torch.manual_seed(0)
    width = shape[-1] if product.endswith("linear") else shape[1]
    model, x = Layers(product, epilogue, width).to(dtype), torch.randn(shape, dtype=dtype)
    models = [model, copy.deepcopy(model)]
    options = [{"rules": "-*"}, {"strict": True}]
    runs = []
    with compat.graph_caches_off():  # the table of rules is ours, and no part of a key
        for own, chosen in zip(models, options, strict=True):
            counters.clear()
            compiled = torch.compile(own, backend="ipex", options=chosen, dynamic=False)
            runs.append(partial(step, compiled, x, own))
            runs[-1]()
    if not counters["ipex"]:
        raise RuntimeError(f"no rule fired in {product}+{epilogue}")
    for want, got in zip(*(run() for run in runs), strict=True):
        error = (got - want).norm() / want.norm()
        if error > TOLERANCE[dtype]:
            raise RuntimeError(f"{product}+{epilogue} {shape} {dtype}: error {error}")
    best = [float("inf")] * len(runs)
    for _ in range(rounds):
        for i, run in enumerate(runs):
            start = time.process_time()
            run()
            best[i] = min(best[i], time.process_time() - start)
    return [seconds * 1e3 for seconds in best]


def main() -> None:
    """Print the table; with --json also append one line a row to FILE."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="only these, such as linear+relu")
    parser.add_argument("--json", help="append the rows to this file, one JSON object a line")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    facts = {
        "date": datetime.date.today().isoformat(),
        "command": "python -m benchmarks training_rules",
        "torch": torch.__version__,
        "device": f"{platform.machine()}, 1 thread",
    }
    torch.set_num_threads(1)
    training.RULES = training.rules({})
    for product, epilogue, shape, dtype in cases():
        name = f"{product}+{epilogue}"
        if options.cases and name not in options.cases:
            continue
        inductor, ours = measure(product, epilogue, shape, dtype, options.rounds)
        row = {"case": name, "shape": str(shape), "dtype": str(dtype)}
        row |= {"inductor_ms": round(inductor, 3), "ipex_ms": round(ours, 3)}
        row |= {"speedup": round(inductor / ours, 3)}
        print(*(f"{key} {value}" for key, value in row.items()), sep="  ", flush=True)
        if options.json:
            with open(options.json, "a") as file:
                file.write(json.dumps({**row, **facts}) + "\n")


if __name__ == "__main__":
    main()
