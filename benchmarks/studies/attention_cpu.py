"""Compare attention over few keys on a CPU: our kernel, also in fp32, and torch's.

    python -m benchmarks attention_cpu [--threads N] [--only WORDS] [--json FILE]

Minima of interleaved rounds, in microseconds of processor time a call, so that other load on the
machine matters less. Errors are relative to fp64. `FASTER` of `passes/attention/short_attention.py`
lists where our kernel is used, `ATTENTION` of `passes/weights/upcast.py` where it runs in fp32; the
casts are included in the time.
"""

import sys
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from ipex_inductor import ops
from ipex_inductor.templates.cpu import cpu_library, short_attention

sys.path.insert(0, str(Path(__file__).parents[1]))
from common.cpu_kernels import append_row, least_times, make_parser

assert ops
ROUNDS = 25
# Texts or images, heads, queries, keys, width of a head: decoding, then as many queries as keys.
CASES = tuple((1, 12, q, k, 64) for k in (128, 512, 1024) for q in (1, 4, 16, k))
CASES += ((1, 12, 197, 197, 64), (16, 12, 128, 128, 64), (16, 12, 197, 197, 64))
CASES += ((1, 32, 1, 1024, 128), (1, 16, 128, 128, 128), (1, 24, 128, 128, 32))


def run_ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Run our kernel."""
    out = torch.empty_like(q)
    short_attention.call(q, k, v, False, q.shape[3] ** -0.5, out=out)
    return out


def run_upcast(*given: torch.Tensor) -> torch.Tensor:
    """Run our kernel in fp32 and round the result once."""
    return run_ours(*(t.float() for t in given)).to(given[0].dtype)


@torch.no_grad()
def main() -> None:
    """Print a row a case; with --json also append it to FILE."""
    options = make_parser(__doc__).parse_args()
    torch.set_num_threads(options.threads)
    if reason := cpu_library.why_not():
        raise SystemExit(reason)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for case in CASES:
            batch, heads, queries, keys, width = case
            row = {"dtype": str(dtype), "batch, heads, queries, keys, width": case}
            if options.only not in str(row):
                continue
            q = torch.randn(batch, heads, queries, width, dtype=dtype)
            k, v = torch.randn(2, batch, heads, keys, width, dtype=dtype)
            calls = {"torch": partial(F.scaled_dot_product_attention, q, k, v)}
            if dtype is not torch.float16:
                calls["ours"] = partial(run_ours, q, k, v)
            if dtype is not torch.float32:
                calls["wide"] = partial(run_upcast, q, k, v)
            truth = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
            best = least_times(calls, "torch", ROUNDS)
            for name, call in calls.items():
                result = call()
                row[f"{name}, us"] = round(best[name], 1)
                row[f"{name}, error"] = float((result.double() - truth).norm() / truth.norm())
            own = "ours" if "ours" in calls else "wide"
            row["speedup"] = round(best["torch"] / best[own], 3)
            append_row(row, options)


if __name__ == "__main__":
    main()
