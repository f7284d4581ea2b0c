"""Fusions that `passes/left.py` leaves to Inductor: its kernels against library kernels.

    python benchmarks/left_to_inductor.py [--json FILE]

Every compiled function does the same work REPEAT times on inputs of its own, so that Dynamo's
guards weigh little. Minima of interleaved rounds, in microseconds per repetition.
"""

import argparse
import datetime
import json
import platform
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

REPEAT, ROUNDS = 16, 40


def add_layer_norm(x: Tensor, y: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """Residual and layer norm."""
    return F.layer_norm(x + y, x.shape[-1:], w, b)


def add_rms_norm(x: Tensor, y: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """Residual and RMS norm, as language models write it."""
    hidden = (x + y).float()
    return w * (hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def embedding_layer_norm(table: Tensor, tokens: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """Embedding and layer norm."""
    return F.layer_norm(F.embedding(tokens, table), w.shape, w, b)


def div_add_softmax(scores: Tensor, mask: Tensor) -> Tensor:
    """Scores scaled, masked, normalised."""
    return F.softmax(scores / 8.0 + mask, -1)


def shuffle(x: Tensor) -> Tensor:
    """Channel shuffle: view, transpose, contiguous, view."""
    b, c, h, w = x.shape
    return x.view(b, 2, c // 2, h, w).transpose(1, 2).contiguous().view(b, c, h, w)


def bmm_bias_gelu(bias: Tensor, x: Tensor, w: Tensor) -> Tensor:
    """A batched linear layer with bias and GELU."""
    return F.gelu(torch.baddbmm(bias, x, w))


def cases(dtype: torch.dtype) -> Iterator[tuple[Callable[..., Tensor], list[tuple[Tensor, ...]]]]:
    """Each function with REPEAT sets of inputs, sized as BERT-base and ShuffleNet have them."""

    def of(*shapes: tuple[int, ...]) -> list[tuple[Tensor, ...]]:
        return [tuple(torch.randn(s).to(dtype) for s in shapes) for _ in range(REPEAT)]

    hidden = (1, 128, 768)
    yield add_layer_norm, of(hidden, hidden, (768,), (768,))
    yield add_rms_norm, of(hidden, hidden, (768,), (768,))
    table = torch.randn(30522, 768).to(dtype)
    tokens = [torch.randint(0, 30522, (1, 128)) for _ in range(REPEAT)]
    norms = of((768,), (768,))
    yield embedding_layer_norm, [(table, t, *n) for t, n in zip(tokens, norms, strict=True)]
    yield div_add_softmax, of((1, 12, 128, 128), (1, 1, 1, 128))
    yield shuffle, of((1, 116, 28, 28))
    yield bmm_bias_gelu, of((8, 1, 256), (8, 64, 256), (8, 256, 256))


def measure(fn: Callable[..., Tensor], inputs: list[tuple[Tensor, ...]]) -> list[float]:
    """Microseconds of one repetition: eager's library kernels, Inductor's."""

    def many(*sets: tuple[Tensor, ...]) -> list[Tensor]:
        return [fn(*arguments) for arguments in sets]

    runs = [many, torch.compile(many)]
    best = [float("inf")] * len(runs)
    for _ in range(ROUNDS):
        for i, run in enumerate(runs):
            start = time.perf_counter()
            run(*inputs)
            best[i] = min(best[i], time.perf_counter() - start)
    return [seconds / REPEAT * 1e6 for seconds in best]


@torch.no_grad()
def main() -> None:
    """Print the table; with --json also append one line a row to FILE."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="append the rows to this file, one JSON object a line")
    options = parser.parse_args()
    facts = {
        "date": datetime.date.today().isoformat(),
        "command": "python benchmarks/left_to_inductor.py",
        "torch": torch.__version__,
        "device": f"{platform.machine()}, {torch.get_num_threads()} threads",
    }
    for dtype in (torch.float32, torch.bfloat16):
        for fn, inputs in cases(dtype):
            torch.compiler.reset()
            eager, inductor = measure(fn, inputs)
            row = {"case": fn.__name__, "dtype": str(dtype), "eager_us": round(eager, 1)}
            row |= {"inductor_us": round(inductor, 1), "speedup": round(eager / inductor, 2)}
            print(*(f"{key} {value}" for key, value in row.items()), sep="  ")
            if options.json:
                with open(options.json, "a") as file:
                    file.write(json.dumps({**row, **facts}) + "\n")


if __name__ == "__main__":
    main()
