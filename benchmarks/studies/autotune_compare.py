"""Measure time and peak memory of comparing two large autotune databases.

    python -m benchmarks autotune_compare [RECORDS]

Half of the records (100,000 by default) are in A and half in B, one problem each with five choices.
Runs `ipex-inductor autotune compare A B` as users do, including the start of Python. Prints the
seconds of each of five runs, the least wall and processor seconds, and the peak memory.
"""

import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ipex_inductor.autotune.database import write
from ipex_inductor.autotune.record import (
    Choice,
    Operand,
    Outcome,
    Problem,
    Provenance,
    Record,
    Timing,
)

RUNS = 5
COMMAND = [sys.executable, "-m", "ipex_inductor", "autotune", "compare"]
MEGABYTE = 1024  # of ru_maxrss, which Linux gives in kilobytes

LIBRARY = Choice("library", "aten.mm")
TEMPLATES = [
    Choice("template", "mm", {"BLOCK_M": rows, "BLOCK_N": 64, "num_warps": warps}, "0a1b2c3d")
    for rows in (64, 128)
    for warps in (4, 8)
]
PROVENANCE = Provenance("2026-11-21T12:00:00Z", "NVIDIA H200", "2.13.0", "0" * 64, "580.1")


def main() -> None:
    """Write, compare, print."""
    records = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    with tempfile.TemporaryDirectory() as folder:
        sides = [Path(folder, name) for name in ("a.jsonl", "b.jsonl")]
        for seed, side in enumerate(sides):
            write(side, make_database(records // 2, random.Random(seed)))
        runs = [time_comparison(sides) for _ in range(RUNS)]
    # Of the largest of the children: each took no more than that.
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / MEGABYTE
    seconds, worked = zip(*runs, strict=True)
    print(f"{records} records: {', '.join(f'{s:.2f}' for s in seconds)} s")
    print(f"least {min(seconds):.2f} s, worked {min(worked):.2f} s, peak {peak:.0f} MB")


def make_database(count, rng):
    """Return records of as many problems."""
    for rows in range(1, count + 1):
        operands = (
            Operand((rows, 4096), (4096, 1), "bfloat16"),
            Operand((4096, 1024), (1024, 1), "bfloat16"),
        )
        problem = Problem("aten.mm.default", operands, "sm_90", {"out_dtype": None}, "relu")
        outcomes = [make_outcome(choice, 10 * rng.uniform(1, 2)) for choice in TEMPLATES]
        yield Record(
            problem, (make_outcome(LIBRARY, 10 * rng.uniform(1, 1.1)), *outcomes), PROVENANCE
        )


def make_outcome(choice, p50):
    """Return a timing with every field of a kernel."""
    timing = Timing(p50 * 0.98, p50, p50 * 1.03, 100, 0.004)
    return Outcome(choice, timing, "", 1e-3, 1e-2, 128, 0, 49152, 0.41, 0.63)


def time_comparison(sides):
    """Return wall and processor seconds of one run, whatever its verdict."""
    start, before = time.perf_counter(), children_seconds()
    done = subprocess.run([*COMMAND, *sides], stdout=subprocess.DEVNULL)
    assert done.returncode in (0, 1), done
    return time.perf_counter() - start, children_seconds() - before


def children_seconds():
    """Return processor seconds of all children so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
