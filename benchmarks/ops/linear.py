"""Compare linear + bias + GELU on one GPU: eager, Inductor, cuBLASLt and our tiles.

    python -m benchmarks ops linear [--shape MxKxN ...] [--gelu none tanh] [--dtype bfloat16]
        [--max-autotune] [--tiles N] [--seconds S] [--budget S] [--json FILE]

Each result is checked against fp64 before timing: a peer that is farther off than torch's own
kernel may be is printed as wrong, without a speed. Rounds are interleaved. Each is a captured graph
of calls on operands in turns that fill more than twice the last cache, so that no weight is cached.
Medians and minima are microseconds of the device a call. `of floor` is the share of the larger of
two bounds: traffic at the H200's copy speed, and arithmetic at the rate of large GEMMs.

Peers: eager; inductor (default mode); max-autotune if requested (tens of seconds a shape); cublaslt
(`aten._addmm_activation`, the tanh form alone); and each of our candidate tiles, named by its
fields: columns, bytes of a step, parts, warps, stages, swapped, joined. `bare` is cuBLAS's GEMM
without bias and GELU. The last line of a shape compares the best recordable choice with the best
other peer, and with the bare GEMM.
"""

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ipex_inductor.autotune import measure, timers
from ipex_inductor.autotune.measure import Candidate, Judge, Run
from ipex_inductor.autotune.record import Choice, Problem
from ipex_inductor.lowerings.problem import settings, shapes
from ipex_inductor.lowerings.problem.workload import inputs_of
from ipex_inductor.lowerings.select import library
from ipex_inductor.lowerings.tune import compiling
from ipex_inductor.target import device as target

# (M, K, N); those that memory limits first, of which the budget may not run out.
SHAPES = (
    (16, 4096, 4096),
    (1, 4096, 11008),
    (4096, 768, 3072),
    (4096, 1024, 4096),
    (8192, 4096, 4096),
    (8192, 4096, 11008),
)
COPIED, MULTIPLIED = 4.27e12, 790e12  # bytes and operations a second: see reference/measured.md
OTHERS = ("eager", "inductor", "max-autotune")
BARE = "bare"
NOT_OURS = ("eager", "max-autotune", BARE)  # Inductor's own is left where nothing is faster
UNARY = {"none": "gelu", "tanh": "gelu_tanh"}


def problem_of(shape: tuple[int, int, int], gelu: str, dtype: str) -> Problem:
    """Return the linear layer with its epilogue as a problem of records."""
    rows, size, columns = shape
    words = f"other=None binary='none' unary='{UNARY[gelu]}' scalars=() packed=False"
    line = f"ipex.linear.default {dtype} {rows}x{size} {columns}x{size} {columns} {words}"
    here = str(target.current("cuda")), settings.settings_of("cuda")
    (problem,) = shapes.problems([line], *here)
    return problem


def run_layer(x: Tensor, weight: Tensor, bias: Tensor, gelu: str) -> Tensor:
    """Run the layer by torch's own kernels."""
    return F.gelu(F.linear(x, weight, bias), approximate=gelu)


def run_bare_gemm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Run the GEMM alone by torch's own kernel."""
    return F.linear(x, weight)


def peers(
    problem: Problem, gelu: str, inputs: Sequence[Tensor], options: argparse.Namespace
) -> Iterator[tuple[str, Callable[[], Run]]]:
    """Names, and how to have each compiled."""

    def function(*operands: Tensor) -> Tensor:
        return run_layer(*operands, gelu)

    def compiled(mode: str) -> Run:
        """Without Dynamo, as the calls and tiles: its guards would not be captured anyway."""
        found = compiling.static(function, inputs, torch._inductor.list_mode_options(mode))
        return lambda given: found(*given)

    yield "eager", lambda: lambda given: function(*given)
    yield BARE, lambda: lambda given: run_bare_gemm(*given)
    yield "inductor", functools.partial(compiled, "default")
    if options.max_autotune:
        yield "max-autotune", functools.partial(compiled, "max-autotune-no-cudagraphs")
    tiles = 0
    for call in library.calls(problem)[1:]:
        tiles += bool(call.parameters)
        if tiles <= options.tiles:
            said = ("joined" if k == "joined" else str(int(v)) for k, v in call.parameters.items())
            name = " ".join([call.name, *said])
            yield name, functools.partial(compiling.compile_choice, problem, call.choice, inputs)


def lower_bound(shape: tuple[int, int, int], itemsize: int) -> float:
    """Return microseconds that no kernel can beat."""
    rows, size, columns = shape
    moved = itemsize * (rows * size + columns * size + columns + rows * columns)
    return 1e6 * max(moved / COPIED, 2 * rows * size * columns / MULTIPLIED)


def time_in_turns(runs: dict[str, Run], problem: Problem, seconds: float) -> dict[str, list[float]]:
    """Return microseconds a call, by rounds in turns."""
    device = torch.device("cuda")
    size = sum(t.nbytes for t in inputs_of(problem, device, 0))
    count = timers.buffers_against_caches(device, size)
    buffers = [inputs_of(problem, device, seed) for seed in range(count)]
    clock = timers.clock_of(device)
    rounds = {name: clock.prepare(run, buffers) for name, run in runs.items()}
    times: dict[str, list[float]] = {name: [] for name in rounds}
    end = time.monotonic() + seconds
    while time.monotonic() < end or min(map(len, times.values())) < 5:
        for name, once in rounds.items():
            times[name].append(once())
    return times


@torch.no_grad()
def measured(
    shape: tuple[int, int, int], gelu: str, options: argparse.Namespace, begin: float
) -> list[dict[str, Any]]:
    """A row for each peer."""
    problem = problem_of(shape, gelu, options.dtype)
    device = torch.device("cuda")
    inputs = inputs_of(problem, device, seed=0)
    doubles = [t.double() for t in inputs]
    judge = Judge(run_layer(*doubles, gelu), run_layer(*inputs, gelu))
    judges = {BARE: Judge(run_bare_gemm(*doubles), run_bare_gemm(*inputs))}
    least = lower_bound(shape, inputs[0].itemsize)
    rows: dict[str, dict[str, Any]] = {}
    runs: dict[str, Run] = {}
    for name, make in peers(problem, gelu, inputs, options):
        row = rows[name] = {"shape": "x".join(map(str, shape)), "gelu": gelu, "peer": name}
        row |= {"dtype": options.dtype, "floor, us": round(least, 2)}
        if name not in (*OTHERS, BARE) and time.monotonic() - begin > options.budget:
            row["left out"] = "the budget is spent"
            continue
        start = time.monotonic()
        try:
            run = make()
            run(inputs)
            torch.cuda.synchronize()
            row["first result, s"] = round(time.monotonic() - start, 2)
            candidate = Candidate(Choice("library", name), run)
            found = measure.verify_candidate(candidate, judges.get(name, judge), inputs)
        except measure.FATAL:
            raise
        except Exception as error:  # one peer's fault is not the others'
            row["failed"] = f"{type(error).__name__}: {str(error).strip()[:500]}"
            continue
        if isinstance(found, float):
            runs[name], row["error"] = run, found
        else:
            row["failed"] = found.reason
    for name, times in time_in_turns(runs, problem, options.seconds).items():
        p50 = statistics.median(times)
        rows[name] |= {"p50, us": round(p50, 2), "minimum, us": round(min(times), 2)}
        rows[name] |= {"rounds": len(times), "of floor": round(least / p50, 3)}
    return [*rows.values()]


def said(rows: Sequence[dict[str, Any]]) -> tuple[float, float] | None:
    """Print the table of one shape.

    How many times as fast ours is as the best of the others; percent over the bare product.
    """
    first = rows[0]
    print(
        f"\n{first['shape']} gelu={first['gelu']} {first['dtype']}, floor {first['floor, us']} us"
    )
    for row in rows:
        timed = (row.get(name, "-") for name in ("p50, us", "minimum, us", "of floor"))
        cells = "".join(f"{cell:>10}" for cell in timed)
        print(f"  {row['peer']:<42}{cells}  {row.get('failed', row.get('left out', ''))}")
    times = {row["peer"]: row["p50, us"] for row in rows if "p50, us" in row}
    others = min((t for name, t in times.items() if name in OTHERS), default=None)
    ours = min((t for name, t in times.items() if name not in NOT_OURS), default=None)
    if others is None or ours is None or BARE not in times:
        return None
    gain, cost = others / ours, 100 * (ours / times[BARE] - 1)
    print(f"  ours {gain:.3f} times as fast as the best of the others", end=", ")
    print(f"{cost:+.1f} % over the bare product", flush=True)
    return float(gain), float(cost)


def describe_run() -> dict[str, str]:
    """Return date, device, versions and command of this run."""
    import triton

    root = Path(__file__).parent
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True
    )
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "device": str(target.current("cuda")),
        "torch": str(torch.__version__),
        "triton": triton.__version__,
        "commit": commit.stdout.strip(),
        "command": " ".join(["python", "-m", "benchmarks", "ops", "linear", *sys.argv[1:]]),
    }


def main() -> None:
    """All shapes and both forms of GELU; ends with 1 if a peer failed or is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", nargs="+", default=["x".join(map(str, s)) for s in SHAPES])
    parser.add_argument("--gelu", nargs="+", default=["tanh", "none"], choices=UNARY)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-autotune", action="store_true", help="Inductor's: slow")
    parser.add_argument("--tiles", type=int, default=14, help="of ours a shape, at most")
    parser.add_argument("--seconds", type=float, default=0.8, help="of timing a table")
    parser.add_argument("--budget", type=float, default=75, help="seconds; then no more tiles")
    parser.add_argument("--json", help="append the rows to this file, one JSON object a line")
    options = parser.parse_args()
    os.environ["IPEX_HOME"] = tempfile.mkdtemp()  # nobody's records
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()  # and an empty cache
    known, begin = describe_run(), time.monotonic()
    print(json.dumps(known), flush=True)
    found: dict[tuple[str, str], tuple[float, float]] = {}
    failed = False
    for shape in options.shape:
        rows_, size, columns = map(int, shape.split("x"))
        for gelu in options.gelu:
            rows = measured((rows_, size, columns), gelu, options, begin)
            if both := said(rows):
                found[gelu, shape] = both
            failed |= any("failed" in row for row in rows)
            if options.json:
                with open(options.json, "a") as file:
                    file.writelines(json.dumps({**known, **row}) + "\n" for row in rows)
    print()
    for gelu in options.gelu:
        of = {shape: both for (form, shape), both in found.items() if form == gelu}
        if of:
            mean = statistics.geometric_mean(gain for gain, _ in of.values())
            costs = ", ".join(f"{shape} {cost:+.1f} %" for shape, (_, cost) in of.items())
            print(f"gelu={gelu}: geometric mean {mean:.3f} over {len(of)} tables")
            print(f"  over the bare product: {costs}")
    print(f"{time.monotonic() - begin:.0f} s")
    sys.exit(failed)


if __name__ == "__main__":
    main()
