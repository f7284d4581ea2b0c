"""Compare attention of a token over a static cache on a CPU: our kernels and torch's.

    python -m benchmarks decode_attention [--threads N] [--only WORDS] [--json FILE]

Minima of interleaved rounds, in microseconds of processor time a call with one thread, of the clock
with more. Keys behind the live ones are hidden by a mask. Queries are grouped as the rule
`grouped-queries` groups them. Errors are relative to fp64.
"""

import sys
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from ipex_inductor.templates.cpu import cpu_library, decode_attention, short_attention

sys.path.insert(0, str(Path(__file__).parents[1]))
from common.cpu_kernels import append_row, least_times, make_parser

ROUNDS = 25
# Texts, heads of keys, queries a head, width: TinyLlama, Llama 8B, Llama 2 7B, four texts.
MODELS = ((1, 4, 8, 64), (1, 8, 4, 128), (1, 32, 1, 128), (4, 4, 8, 64))
CACHES = ((1024, 128), (4096, 128), (1024, 1024), (4096, 4096))  # the ceiling, and live keys
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def list_calls(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> dict:
    """Return the calls by name: the kernel for few keys has no fp16, and at most 1024 keys."""
    scale, out = q.shape[3] ** -0.5, torch.empty_like(q)
    calls = {
        "torch": partial(F.scaled_dot_product_attention, q, k, v, mask),
        "decode": partial(decode_attention.call, q, k, v, mask, True, False, scale, out=out),
    }
    if q.dtype is not torch.float16 and k.shape[2] <= 1024:
        calls["short"] = partial(short_attention.call, q, k, v, mask, False, scale, out=out)
    return calls


@torch.no_grad()
def main() -> None:
    """Print a row a case; with --json also append it to FILE."""
    options = make_parser(__doc__).parse_args()
    torch.set_num_threads(options.threads)
    if reason := cpu_library.why_not():
        raise SystemExit(reason)
    for dtype in DTYPES:
        for sizes in MODELS:
            for ceiling, live in CACHES:
                measure(options, dtype, sizes, ceiling, live)


def measure(options, dtype, sizes, ceiling: int, live: int) -> None:
    """Print the row of one case, unless the options leave it out."""
    batch, heads, queries, width = sizes
    row = {
        "dtype": str(dtype),
        "batch, heads, queries, width": sizes,
        "ceiling": ceiling,
        "live": live,
    }
    if options.only not in str(row):
        return
    q = torch.randn(batch, heads, queries, width, dtype=dtype)
    k, v = torch.randn(2, batch, heads, ceiling, width, dtype=dtype)
    mask = torch.zeros(batch, 1, 1, ceiling, dtype=dtype)
    mask[..., live:] = -torch.inf
    calls = list_calls(q, k, v, mask)
    truth = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), mask.double())
    best = least_times(calls, "torch", ROUNDS, wall=options.threads > 1)
    for name in calls:
        row[f"{name}, us"] = round(best[name], 1)
        row[f"torch / {name}"] = round(best["torch"] / best[name], 2)
    result = torch.empty_like(q)
    decode_attention.call(q, k, v, mask, True, False, width**-0.5, out=result)
    row["decode, error"] = float((result.double() - truth).norm() / truth.norm())
    append_row(row, options)


if __name__ == "__main__":
    main()
