"""Peers, checks and timing for inference benchmarks on one GPU.

In bf16, or fp16 (`--dtype float16`). Each peer's result is checked on a few rows against the same
model in fp64 before timing, with the error of fp32 beside it: a peer that is farther off than eager
may be is printed as wrong, without a speed. Then each is captured in a CUDA graph, and the graphs
are replayed in turns; medians and minima of the device's time between events, in milliseconds. The
seconds until the first result include compilation and tuning.

Peers: eager; inductor (default mode with freezing); ours (default mode, with the shipped records
alone); tuned (ours, after library calls are measured for at most --tune seconds, into --database).
On request max-autotune (Inductor's) and templates (ours, also tuned with Inductor's templates),
which take minutes.
"""

import argparse
import copy
import fcntl
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn

from common.command import command_line
from ipex_inductor.aot_cache.digest import source_digest
from ipex_inductor.passes.fusion.library import FIRST_CALL
from ipex_inductor.reporting import decisions
from ipex_inductor.target import device as target

USUAL = ("eager", "inductor", "ours", "tuned")
MORE = ("max-autotune", "templates")
LIBRARIES = {"max_autotune_gemm_backends": "ATEN", "max_autotune_conv_backends": "ATEN"}
# A result may be off by so many times what eager's is: where a batch norm is folded, weights
# are rounded once more and activations once less.
ERRORS = 2.0
Run = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """A model in fp32 and its input, on the GPU: `few` rows of that are computed in fp64."""

    name: str
    model: nn.Module
    x: Tensor
    few: int
    about: dict[str, Any]  # what is printed of it besides


def cast_floating(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast floating-point tensors; token ids keep their dtype."""
    return x.to(dtype) if x.is_floating_point() else x


@contextmanager
def enable_freezing(threads: int | None = None) -> Iterator[None]:
    """Enable Inductor's freezing, which Dynamo reads from the global configuration."""
    from torch._inductor import config

    usual = config.compile_threads
    config.freezing, config.compile_threads = True, threads or usual
    try:
        yield
    finally:
        config.freezing, config.compile_threads = False, usual


def compile_peer(peer: str, model: nn.Module, x: Tensor, options: argparse.Namespace) -> Run:
    """Return the peer's model after its first call."""
    if peer == "eager":
        return model
    if peer in ("inductor", "max-autotune"):
        # Without graphs of its own: all peers are captured alike below.
        mode = "max-autotune-no-cudagraphs" if peer == "max-autotune" else None
        # Once torch 2.11 has workers, each candidate is compiled there and again where it is
        # timed, one by one; without any, by threads of this process, once (37 s and 11 for four
        # layers on an H100's host).
        with enable_freezing(threads=1 if mode else None):
            found = torch.compile(model, mode=mode)
            found(x)
        return found
    ours: dict[str, Any] = {"strict": True}
    if peer != "ours":
        database = os.path.join(options.database, peer)
        ours |= {"autotune_database": database}
        ours |= {"autotune": "always", "autotune_budget_s": options.tune}
        ours |= LIBRARIES if peer == "tuned" else {}
    found = torch.compile(model, backend="ipex", options=ours)
    found(x)
    return found


def capture_graph(run: Run, x: Tensor) -> torch.cuda.CUDAGraph:
    """Capture the call on `x` in a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run(x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(x)
    return graph


@contextmanager
def hold_lock(lock: str | None) -> Iterator[None]:
    """Hold the lock of this file, so that other processes that request it wait."""
    with open(lock, "a") if lock else nullcontext() as file:
        if file:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def lock_inductors_timing(lock: str) -> None:
    """Hold the lock also while Inductor times its candidates."""
    from torch._inductor.runtime.benchmarking import benchmarker

    timed = benchmarker.benchmark_gpu

    def alone(*args: Any, **kwargs: Any) -> Any:
        with hold_lock(lock):
            return timed(*args, **kwargs)

    benchmarker.benchmark_gpu = alone  # type: ignore[method-assign]


class Late(BaseException):
    """Of no kind that a compiler takes for a candidate's fault."""


@contextmanager
def patience(seconds: int) -> Iterator[None]:
    """Raise `Late` where it takes longer."""

    def late(*_: Any) -> None:
        raise Late(f"not through after {seconds} s")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def time_in_turns(
    runs: dict[str, Callable[[], Any]],
    seconds: float,
    timed: "Callable[[Callable[[], Any], int], float] | None" = None,
    length: float = 50,
) -> dict[str, list[float]]:
    """Milliseconds of one call, a block of calls at a time, the peers in turns.

    Each round in another order: who comes after a peer that draws less power finds higher clocks.

    Args:
        runs: The peers' calls by name.
        seconds: At least so long.
        timed: Returns the milliseconds of one of so many calls; `block` if not given.
        length: Of a block, in milliseconds.
    """
    timed = timed or time_block
    times: dict[str, list[float]] = {name: [] for name in runs}
    counts: dict[str, int] = {}
    for name, run in runs.items():
        try:
            counts[name] = max(5, int(length / max(timed(run, 5), 1e-3)))
            timed(run, counts[name])
        except Exception as error:  # after a fault of a kernel nothing runs any more
            error.add_note(f"while {name} ran")
            raise
    end = time.monotonic() + seconds
    order = random.Random(0)
    while time.monotonic() < end or min(map(len, times.values())) < 5:
        for name in order.sample([*runs], len(runs)):
            times[name].append(timed(runs[name], counts[name]))
    return times


def time_block(run: Callable[[], Any], count: int) -> float:
    """Return milliseconds of one of `count` calls."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / count


def count_choices() -> dict[str, int]:
    """Count the choices of our last graph; `?` marks those that were not measured."""
    found: dict[str, int] = {}
    for event in decisions.reports()[-1].events if decisions.reports() else ():
        if event.kind == "choice" and event.subject != FIRST_CALL:
            name, _, reason = event.reason.partition(":")
            name += "?" * ("recorded of" in reason)
            found[name] = found.get(name, 0) + 1
    return found


def relative_errors(result: Tensor, exact: Tensor) -> tuple[float, float]:
    """Return the largest and the mean difference, relative to the largest exact value."""
    off = (result.double() - exact).abs() / exact.abs().max()
    return float(off.max()), float(off.mean())


def describe_run(*packages: str, device: str = "cuda") -> dict[str, str]:
    """Return date, device, versions and command of this run."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "device": str(target.current(device)),
        "torch": str(torch.__version__),
        **{name: version(name) for name in ("triton", *packages)},
        "cudnn": str(torch.backends.cudnn.version()),
        "sources": source_digest()[:12],
        "command": command_line(),
    }


@torch.no_grad()
def measure(options: argparse.Namespace, case: Case, about: dict[str, str]) -> bool:
    """Print a row for each peer; return whether all of them are right."""
    dtype = getattr(torch, options.dtype)
    reference, few = case.model, cast_floating(case.x[: case.few], dtype)
    rounded = copy.deepcopy(reference).to(dtype)
    exact = copy.deepcopy(rounded).double()(cast_floating(few, torch.double))  # of rounded weights
    single = relative_errors(copy.deepcopy(rounded).float()(cast_floating(few, torch.float)), exact)
    model, x = rounded, cast_floating(case.x, dtype)
    rows: dict[str, dict[str, Any]] = {}
    runs: dict[str, Run] = {}  # a graph reads what its peer holds
    graphs: dict[str, Callable[[], Any]] = {}
    torch.compiler.reset()
    for peer in options.peers:
        decisions.clear()
        row = rows[peer] = {"model": case.name, "batch": len(x), **case.about, "peer": peer}
        row |= {} if dtype is torch.bfloat16 else {"dtype": options.dtype}
        begin = time.monotonic()
        try:
            with patience(options.patience):
                run = runs[peer] = compile_peer(peer, copy.deepcopy(model), x, options)
            result = run(x)
            torch.cuda.synchronize()
            row["first result, s"] = round(time.monotonic() - begin, 2)
            row["error max, mean"] = relative_errors(result[: case.few], exact)
            row["calls"] = count_choices()
            graphs[peer] = capture_graph(run, x).replay
        except (Exception, Late) as error:  # one peer's fault is not the others'
            row["failed"] = f"{type(error).__name__}: {str(error).strip()[:500]}"
            graphs.pop(peer, None)
    allowed = [ERRORS * e for e in rows["eager"].get("error max, mean", single)]
    for peer, row in rows.items():
        found = row.get("error max, mean")
        if found and any(e > a for e, a in zip(found, allowed, strict=True)):
            row["failed"] = f"wrong by {found} where {allowed} is allowed: no speed of it"
            graphs.pop(peer, None)
    with hold_lock(options.lock):
        times = time_in_turns(graphs, options.seconds) if graphs else {}
    for peer, row in rows.items():
        if peer in times:
            row["median, ms"] = round(statistics.median(times[peer]), 4)
            row["minimum, ms"] = round(min(times[peer]), 4)
            row["per second"] = round(len(x) / row["median, ms"] * 1e3)
        row["fp32 error max, mean"] = single
        append_row(options, about, row)
    return not any("failed" in row for row in rows.values())


def append_row(
    options: argparse.Namespace, about: dict[str, str], row: dict[str, Any], shown: str = ""
) -> None:
    """Print a row (or `shown` in its place), and append it to the file of `--json`."""
    print(shown or json.dumps(row), flush=True)
    if options.json:
        with open(options.json, "a") as file:
            file.write(json.dumps({**about, **row}) + "\n")


def make_parser(about: str) -> argparse.ArgumentParser:
    """Return the options that benchmarks on one GPU share."""
    parser = argparse.ArgumentParser(description=about.split("\n")[0])
    parser.add_argument("--peers", nargs="+", default=USUAL, choices=USUAL + MORE)
    parser.add_argument("--tune", type=int, default=60, help="seconds a case, at most")
    parser.add_argument("--seconds", type=float, default=4, help="of timing a case")
    parser.add_argument("--patience", type=int, default=0, help="seconds to compile in; 0: any")
    parser.add_argument(
        "--cudnn-benchmark", action="store_true", help="cuDNN times its kernels, for all peers"
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    parser.add_argument("--lock", help="a file, locked while timing: others compile meanwhile")
    parser.add_argument("--database", help="of records, for the next run; empty if not named")
    parser.add_argument("--json", help="append the rows to this file, one JSON object a line")
    return parser


def run_cases(
    parser: argparse.ArgumentParser,
    options: argparse.Namespace,
    cases: Iterator[Case],
    about: dict[str, str],
) -> None:
    """Measure all cases; exit with 1 if any peer failed or is wrong."""
    if "eager" not in options.peers:
        parser.error("eager is what the others are held against")
    options.database = options.database or tempfile.mkdtemp()
    torch.backends.cudnn.benchmark = options.cudnn_benchmark
    # A code object that is compiled for one peer after the other, at the sizes it is given.
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.automatic_dynamic_shapes = False
    os.environ["IPEX_HOME"] = tempfile.mkdtemp()  # nobody's records, and an empty kernel cache
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()
    if options.lock:
        lock_inductors_timing(options.lock)
    print(json.dumps(about), flush=True)
    right = True
    for case in cases:
        right &= measure(options, case, about)
    sys.exit(0 if right else 1)
