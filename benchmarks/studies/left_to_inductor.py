"""Compare fusions that are left to Inductor with library kernels on a CPU.

    python -m benchmarks left_to_inductor [--json FILE] [--only NAME]

Each compiled function does the same work REPEAT times on separate inputs, so that Dynamo's guards
weigh little. Minima of interleaved rounds, in microseconds per repetition.
"""

import argparse
import datetime
import json
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ipex_inductor.target.device import current

REPEAT, ROUNDS = 16, 40


def add_layer_norm(x: Tensor, y: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """Add a residual and normalize by layer norm."""
    return F.layer_norm(x + y, x.shape[-1:], w, b)


def add_rms_norm(x: Tensor, y: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """Add a residual and normalize by RMS norm, as language models write it."""
    hidden = (x + y).float()
    return w * (hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def embedding_layer_norm(table: Tensor, tokens: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """Look up an embedding and normalize by layer norm."""
    return F.layer_norm(F.embedding(tokens, table), w.shape, w, b)


def div_add_softmax(scores: Tensor, mask: Tensor) -> Tensor:
    """Scale scores, add a mask and apply softmax."""
    return F.softmax(scores / 8.0 + mask, -1)


def shuffle(x: Tensor) -> Tensor:
    """Shuffle channels: view, transpose, contiguous, view."""
    b, c, h, w = x.shape
    return x.view(b, 2, c // 2, h, w).transpose(1, 2).contiguous().view(b, c, h, w)


def bmm_bias_gelu(bias: Tensor, x: Tensor, w: Tensor) -> Tensor:
    """Apply a batched linear layer with bias and GELU."""
    return F.gelu(torch.baddbmm(bias, x, w))


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Compute attention by hand with an added mask, in a form that Inductor does not match."""
    return F.softmax(q @ k.transpose(-1, -2) * 0.125 + mask, -1) @ v


def filled_attention(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """Compute attention by hand with masked scores replaced."""
    scores = q @ k.transpose(-1, -2) * 0.125
    return F.softmax(torch.where(keep > 0, scores, torch.finfo(q.dtype).min), -1) @ v


def fused_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Compute `attention` as the rule rewrites it."""
    return F.scaled_dot_product_attention(q, k, v, mask)


def fused_filled_attention(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """Compute `filled_attention` as the rule rewrites it."""
    mask = torch.where(keep > 0, keep.new_zeros(()), torch.finfo(q.dtype).min)
    return F.scaled_dot_product_attention(q, k, v, mask)


# What the library has for a case, where that is not the case itself in eager mode.
LIBRARY = {attention: fused_attention, filled_attention: fused_filled_attention}


def cases(dtype: torch.dtype) -> Iterator[tuple[Callable[..., Tensor], list[tuple[Tensor, ...]]]]:
    """Yield each function with REPEAT sets of inputs, sized as in BERT-base and ShuffleNet."""

    def of(*shapes: tuple[int, ...]) -> list[tuple[Tensor, ...]]:
        return [tuple(torch.randn(s).to(dtype) for s in shapes) for _ in range(REPEAT)]

    hidden = (1, 128, 768)
    yield add_layer_norm, of(hidden, hidden, (768,), (768,))
    yield add_rms_norm, of(hidden, hidden, (768,), (768,))
    table = torch.randn(30522, 768).to(dtype)
    texts = [torch.randint(0, 30522, (1, 128)) for _ in range(REPEAT)]
    norms = of((768,), (768,))
    yield embedding_layer_norm, [(table, t, *n) for t, n in zip(texts, norms, strict=True)]
    yield div_add_softmax, of((1, 12, 128, 128), (1, 1, 1, 128))
    yield shuffle, of((1, 116, 28, 28))
    for batch, tokens in ((1, 128), (8, 128), (32, 128), (1, 384), (1, 512), (1, 1024)):
        heads = (batch, 12, tokens, 64)
        yield attention, of(heads, heads, heads, (batch, 1, 1, tokens))
        yield filled_attention, of(heads, heads, heads, (1, 1, tokens, tokens))
    yield bmm_bias_gelu, of((8, 1, 256), (8, 64, 256), (8, 256, 256))


def measure(fn: Callable[..., Tensor], inputs: list[tuple[Tensor, ...]]) -> list[float]:
    """Microseconds of one repetition: library kernels, Inductor's."""

    def repeated(fn: Callable[..., Tensor]) -> Callable[..., list[Tensor]]:
        return lambda *sets: [fn(*arguments) for arguments in sets]

    library = repeated(LIBRARY.get(fn, fn))
    runs = [torch.compile(library) if fn in LIBRARY else library, torch.compile(repeated(fn))]
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
    parser.add_argument("--only", default="", help="the cases whose name and dtype hold this")
    options = parser.parse_args()
    facts = {
        "date": datetime.date.today().isoformat(),
        "command": "python -m benchmarks left_to_inductor",
        "torch": torch.__version__,
        "device": f"{current().arch}, {torch.get_num_threads()} threads",
    }
    for dtype in (torch.float32, torch.bfloat16):
        for fn, inputs in cases(dtype):
            if options.only not in f"{fn.__name__} {dtype}":
                continue
            torch.compiler.reset()
            eager, inductor = measure(fn, inputs)
            row = {"case": fn.__name__, "dtype": str(dtype), "shape": list(inputs[0][0].shape)}
            row |= {
                "eager_us": round(eager, 1),
                "inductor_us": round(inductor, 1),
                "speedup": round(eager / inductor, 2),
            }
            print(*(f"{key} {value}" for key, value in row.items()), sep="  ")
            if options.json:
                with open(options.json, "a") as file:
                    file.write(json.dumps({**row, **facts}) + "\n")


if __name__ == "__main__":
    main()
