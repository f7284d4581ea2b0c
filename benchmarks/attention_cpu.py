"""Attention over few keys on a CPU: by our kernel, and by torch's.

    python benchmarks/attention_cpu.py [--threads N] [--only WORDS] [--json FILE]

Minima of interleaved rounds, of the process's processor time, so that others who work on the
machine matter less, in microseconds a call. Errors are relative to fp64. `FASTER` of
`passes/short_attention.py` says where ours is taken.
"""

import argparse
import datetime
import json
import math
import sys

import torch
import torch.nn.functional as F
from blocked import seconds

from ipex_inductor import ops
from ipex_inductor.target import current
from ipex_inductor.templates import cpu_library, short_attention

assert ops
ROUNDS = 25
# Texts or images, heads, queries, keys, width of a head: decoding, then as many queries as keys.
CASES = tuple((1, 12, q, k, 64) for k in (128, 512, 1024) for q in (1, 4, 16, k))
CASES += ((1, 12, 197, 197, 64), (16, 12, 128, 128, 64), (16, 12, 197, 197, 64))
CASES += ((1, 32, 1, 1024, 128), (1, 16, 128, 128, 128), (1, 24, 128, 128, 32))


@torch.no_grad()
def main() -> None:
    """Print a row a case; with --json also append it to FILE."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", default="", help="the cases in whose row this stands")
    parser.add_argument("--json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if reason := cpu_library.why_not():
        raise SystemExit(reason)
    known = {
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "arch": current().arch,
        "threads": options.threads,
        "command": " ".join(["python", "benchmarks/attention_cpu.py", *sys.argv[1:]]),
    }
    for dtype in (torch.bfloat16, torch.float32):
        for case in CASES:
            batch, heads, queries, keys, width = case
            row = {"dtype": str(dtype), "batch, heads, queries, keys, width": case}
            if options.only not in str(row):
                continue
            q = torch.randn(batch, heads, queries, width, dtype=dtype)
            k, v = torch.randn(2, batch, heads, keys, width, dtype=dtype)
            out = torch.empty_like(q)
            scale = width**-0.5
            calls = {
                "ours": lambda: short_attention.call(q, k, v, False, scale, out=out),  # noqa: B023
                "torch": lambda: F.scaled_dot_product_attention(q, k, v),  # noqa: B023
            }
            truth = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
            best = dict.fromkeys(calls, math.inf)
            count = max(1, int(2e-3 / seconds(calls["torch"], 3)))
            for _ in range(ROUNDS):
                for name, call in calls.items():
                    best[name] = min(best[name], seconds(call, count) * 1e6)
            results = {"ours": out, "torch": calls["torch"]()}
            for name, result in results.items():
                row[f"{name}, us"] = round(best[name], 1)
                row[f"{name}, error"] = float((result.double() - truth).norm() / truth.norm())
            row["speedup"] = round(best["torch"] / best["ours"], 3)
            print(json.dumps(row), flush=True)
            if options.json:
                with open(options.json, "a") as file:
                    file.write(json.dumps({**row, **known}) + "\n")


if __name__ == "__main__":
    main()
