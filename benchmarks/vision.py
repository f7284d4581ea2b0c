"""Inference of a vision model on one GPU, side by side in one run: eager, Inductor, ours.

    python benchmarks/vision.py [--batch 1 128] [--model resnet50] [--peers NAME ...]
        [--tune SECONDS] [--database FOLDER] [--json FILE]

In bf16 and channels-last, with random weights and batch-norm statistics that were run in, on one
GPU. What a peer computes is held against the same model in fp64 on a few images before it is
timed, and beside it in fp32: who is farther off than eager may be is printed as wrong, without a
speed. Then each is captured in a CUDA graph, and the graphs are replayed in turns; medians and
minima of the device's time between events, in milliseconds. Beside them the seconds until the first
result, compilation and tuning included.

Peers: eager; inductor (default mode with freezing); ours (default mode, nothing recorded); tuned
(ours, the library's calls measured first for at most --tune seconds, into --database). If named,
max-autotune (Inductor's) and templates (ours, tuned with Inductor's templates too): minutes.
"""

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import torch
import torchvision
from torch import Tensor, nn

from ipex_inductor import decisions, target

USUAL = ("eager", "inductor", "ours", "tuned")
MORE = ("max-autotune", "templates")
LAST: dict[str, Any] = {"memory_format": torch.channels_last}
FEW = 4  # images that are computed in fp64
LIBRARIES = {"max_autotune_gemm_backends": "ATEN", "max_autotune_conv_backends": "ATEN"}
# A bf16 result may be off by so many times what eager's is: where a batch norm is folded, weights
# are rounded once more and activations once less.
ERRORS = 2.0


def model_of(name: str) -> nn.Module:
    """In fp32 on the GPU, with statistics of batch norms as its own activations have them."""
    torch.manual_seed(0)
    model = getattr(torchvision.models, name)(weights=None).cuda().to(**LAST)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None  # the mean of all batches
    with torch.no_grad():
        for _ in range(4):
            model(torch.randn(32, 3, 224, 224, device="cuda").to(**LAST))
    return model.eval()


@contextmanager
def frozen() -> Iterator[None]:
    """Inductor's freezing, which Dynamo reads from the global configuration."""
    from torch._inductor import config

    config.freezing = True
    try:
        yield
    finally:
        config.freezing = False


def compiled(
    peer: str, model: nn.Module, x: Tensor, options: argparse.Namespace
) -> Callable[[Tensor], Tensor]:
    """The peer's model after its first call."""
    if peer == "eager":
        return model
    if peer in ("inductor", "max-autotune"):
        # Without graphs of its own: all peers are captured alike below.
        mode = "max-autotune-no-cudagraphs" if peer == "max-autotune" else None
        with frozen():
            found = torch.compile(model, mode=mode)
            found(x)
        return found
    database = os.path.join(options.database if peer != "ours" else tempfile.mkdtemp(), peer)
    ours: dict[str, Any] = {"strict": True, "autotune_database": database}
    if peer != "ours":
        ours |= {"autotune": "always", "autotune_budget_s": options.tune}
        ours |= LIBRARIES if peer == "tuned" else {}
    found = torch.compile(model, backend="ipex", options=ours)
    found(x)
    return found


def captured(run: Callable[[Tensor], Tensor], x: Tensor) -> torch.cuda.CUDAGraph:
    """The call on `x` as a graph."""
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


def raced(graphs: dict[str, torch.cuda.CUDAGraph], seconds: float) -> dict[str, list[float]]:
    """Milliseconds of one replay, a block of replays at a time, the graphs in turns."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    counts: dict[str, int] = {}
    for name, graph in graphs.items():
        counts[name] = max(5, int(50 / max(block(graph, 5), 1e-3)))  # blocks of 50 ms
        block(graph, counts[name])
    end = time.monotonic() + seconds
    while time.monotonic() < end or min(map(len, times.values())) < 5:
        for name, graph in graphs.items():
            times[name].append(block(graph, counts[name]))
    return times


def block(graph: torch.cuda.CUDAGraph, count: int) -> float:
    """Milliseconds of one of so many replays."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / count


def calls() -> dict[str, int]:
    """How often what was chosen in the last graph of ours; `?` where nothing was measured."""
    found: dict[str, int] = {}
    for event in decisions.reports()[-1].events if decisions.reports() else ():
        if event.kind == "choice":
            name, _, reason = event.reason.partition(":")
            name += "?" * ("recorded of" in reason)
            found[name] = found.get(name, 0) + 1
    return found


def errors(result: Tensor, exact: Tensor) -> tuple[float, float]:
    """The largest and the mean difference, of the largest exact value."""
    off = (result.double() - exact).abs() / exact.abs().max()
    return float(off.max()), float(off.mean())


def versions() -> dict[str, str]:
    """What was measured with."""
    import triton

    root = os.path.dirname(os.path.abspath(__file__))
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True
    )
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "device": str(target.current("cuda")),
        "torch": str(torch.__version__),
        "triton": triton.__version__,
        "torchvision": torchvision.__version__,
        "cudnn": str(torch.backends.cudnn.version()),
        "commit": commit.stdout.strip(),
        "command": " ".join(["python", "benchmarks/vision.py", *sys.argv[1:]]),
    }


@torch.no_grad()
def measure(options: argparse.Namespace, batch: int, known: dict[str, str]) -> bool:
    """One batch size: a row for each peer. Whether all of them are right."""
    reference = model_of(options.model)
    x32 = torch.randn(batch, 3, 224, 224, device="cuda").to(**LAST)
    few = x32[:FEW].bfloat16()
    exact = copy.deepcopy(reference).bfloat16().double()(few.double())  # of rounded weights
    single = errors(copy.deepcopy(reference).bfloat16().float()(few.float()), exact)
    model, x = reference.bfloat16(), x32.bfloat16()
    rows: dict[str, dict[str, Any]] = {}
    runs, graphs = {}, {}  # a graph reads what its peer holds
    torch.compiler.reset()
    for peer in options.peers:
        decisions.clear()
        row = rows[peer] = {"model": options.model, "batch": batch, "peer": peer}
        begin = time.monotonic()
        try:
            run = runs[peer] = compiled(peer, copy.deepcopy(model), x, options)
            result = run(x)
            torch.cuda.synchronize()
            row["first result, s"] = round(time.monotonic() - begin, 2)
            row["error max, mean"] = errors(result[:FEW], exact)
            row["calls"] = calls()
            graphs[peer] = captured(run, x)
        except Exception as error:  # one peer's fault is not the others'
            row["failed"] = f"{type(error).__name__}: {str(error).strip()[:500]}"
            graphs.pop(peer, None)
    allowed = [ERRORS * e for e in rows["eager"].get("error max, mean", single)]
    for peer, row in rows.items():
        found = row.get("error max, mean")
        if found and any(e > a for e, a in zip(found, allowed, strict=True)):
            row["failed"] = f"wrong by {found} where {allowed} is allowed: no speed of it"
            graphs.pop(peer, None)
    times = raced(graphs, options.seconds) if graphs else {}
    for peer, row in rows.items():
        if peer in times:
            row["median, ms"] = round(statistics.median(times[peer]), 4)
            row["minimum, ms"] = round(min(times[peer]), 4)
            row["images/s"] = round(batch / row["median, ms"] * 1e3)
        row["fp32 error max, mean"] = single
        print(json.dumps(row), flush=True)
        if options.json:
            with open(options.json, "a") as file:
                file.write(json.dumps({**known, **row}) + "\n")
    return not any("failed" in row for row in rows.values())


def main() -> None:
    """All batch sizes; ends with 1 if any peer failed or is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 128])
    parser.add_argument("--model", default="resnet50", help="of torchvision's")
    parser.add_argument("--peers", nargs="+", default=USUAL, choices=USUAL + MORE)
    parser.add_argument("--tune", type=int, default=60, help="seconds a batch size, at most")
    parser.add_argument("--seconds", type=float, default=4, help="of timing a batch size")
    parser.add_argument("--database", help="of records, for the next run; empty if not named")
    parser.add_argument("--json", help="append the rows to this file, one JSON object a line")
    options = parser.parse_args()
    if "eager" not in options.peers:
        parser.error("eager is what the others are held against")
    options.database = options.database or tempfile.mkdtemp()
    # A code object that is compiled for one peer after the other, at the sizes it is given.
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.automatic_dynamic_shapes = False
    os.environ["IPEX_HOME"] = tempfile.mkdtemp()  # nobody's records, and an empty kernel cache
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()
    known = versions()
    print(json.dumps(known), flush=True)
    right = [measure(options, batch, known) for batch in options.batch]
    sys.exit(0 if all(right) else 1)


if __name__ == "__main__":
    main()
