"""Compare wall time of inference on one GPU, launches included, with and without capture.

    python -m benchmarks capture [--models resnet50 gpt2 mlp] [--peers NAME ...] [--seconds S]
        [--json FILE]

Milliseconds of wall time of a call that is waited for, and of one of many that are not, with the
peers in turns: eager; inductor and reduce-overhead (Inductor's modes); ours (default mode) and
launched (ours without capture). Results of a few rows are checked against fp64 before timing: a
peer that is farther off than eager may be is printed as wrong, without a speed. The rest is as in
`common/gpu_peers.py`.
"""

import argparse
import copy
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ipex_inductor.capture.policy import NAME
from ipex_inductor.reporting import decisions

sys.path.insert(0, str(Path(__file__).parents[1]))
from common.gpu_peers import ERRORS, append_row, cast_floating, describe_run, relative_errors

PEERS: dict[str, dict[str, Any] | None] = {
    "eager": None,
    "inductor": {},
    "reduce-overhead": {"mode": "reduce-overhead"},
    "ours": {"backend": "ipex", "options": {"strict": True}},
    "launched": {"backend": "ipex", "options": {"strict": True, "capture": False}},
}
FEW = 4  # rows that are computed in fp64
WARM_UP = 8  # calls: Inductor's trees record in the third, ours in the third too
BLOCK = 20  # calls that are not waited for


@dataclass(frozen=True)
class Case:
    """A model in bf16 and its input."""

    name: str
    batch: int
    model: nn.Module
    x: Tensor


def cases(models: list[str]) -> Iterator[Case]:
    """Yield each model, at a size or two."""
    torch.manual_seed(0)
    if "mlp" in models:
        layers = [m for _ in range(4) for m in (nn.Linear(512, 512), nn.GELU())]
        model = nn.Sequential(*layers).cuda().bfloat16().eval()
        yield Case("mlp", 16, model, torch.randn(16, 512, device="cuda", dtype=torch.bfloat16))
    if "resnet50" in models:
        import vision

        model = vision.model_of("resnet50").bfloat16()
        for batch in (1, 64):
            x = torch.randn(batch, 3, 224, 224, device="cuda", dtype=torch.bfloat16)
            yield Case("resnet50", batch, model, x.to(**vision.LAST))
    if "gpt2" in models:
        import nlp

        model, words = nlp.model_of("gpt2")
        yield Case("gpt2", 1, model.bfloat16(), torch.randint(words, (1, 128), device="cuda"))


def time_waited_call(run: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """Return milliseconds of a call until its result is there."""
    begin = time.perf_counter()
    run(x)
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) * 1e3


def time_queued_call(run: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """Return milliseconds of one of a block of calls, with a wait for the last only."""
    begin = time.perf_counter()
    for _ in range(BLOCK):
        run(x)
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) * 1e3 / BLOCK


def time_return(run: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """Return milliseconds until a call returns, with an idle device before it."""
    begin = time.perf_counter()
    run(x)
    end = time.perf_counter()
    torch.cuda.synchronize()
    return (end - begin) * 1e3


CLOCKS = {"call": time_waited_call, "streamed": time_queued_call, "host": time_return}


def time_in_turns(
    runs: dict[str, Callable[[Tensor], Tensor]], x: Tensor, seconds: float
) -> dict[str, dict[str, list[float]]]:
    """Times by peer and clock, the peers in turns, each round in another order."""
    times: dict[str, dict[str, list[float]]] = {p: {c: [] for c in CLOCKS} for p in runs}
    end, order = time.monotonic() + seconds, random.Random(0)
    while time.monotonic() < end or any(len(t["call"]) < 5 for t in times.values()):
        for peer in order.sample([*runs], len(runs)):
            for name, clock in CLOCKS.items():
                times[peer][name].append(clock(runs[peer], x))
    return times


def compiled(
    peer: str, case: Case, exact: Tensor
) -> tuple[Callable[[Tensor], Tensor], dict[str, Any]]:
    """The peer's model after its first calls, and what is known of it."""
    decisions.clear()
    how = PEERS[peer]
    begin = time.monotonic()
    model: Any = copy.deepcopy(case.model)
    run = model if how is None else torch.compile(model, **how)
    result = run(case.x).clone()
    torch.cuda.synchronize()
    about: dict[str, Any] = {"first result, s": round(time.monotonic() - begin, 2)}
    about["error max, mean"] = relative_errors(result[:FEW], exact)
    for _ in range(WARM_UP):
        result = run(case.x).clone()
    about["later"] = relative_errors(result[:FEW], exact)
    if how and how.get("backend") == "ipex":
        events = (event for report in decisions.reports() for event in report.events)
        about["capture"] = [event.reason for event in events if event.subject == NAME]
    return run, about


@torch.no_grad()
def measure(options: argparse.Namespace, case: Case, about: dict[str, str]) -> bool:
    """Print a row for each peer; return whether all of them are right."""
    torch.compiler.reset()
    exact = copy.deepcopy(case.model).double()(cast_floating(case.x[:FEW], torch.double))
    allowed = [ERRORS * e for e in relative_errors(case.model(case.x)[:FEW], exact)]
    rows: dict[str, dict[str, Any]] = {}
    runs: dict[str, Callable[[Tensor], Tensor]] = {}
    for peer in options.peers:
        row = rows[peer] = {"model": case.name, "batch": case.batch, "peer": peer}
        try:
            runs[peer], told = compiled(peer, case, exact)
        except Exception as error:  # one peer's fault is not the others'
            row["failed"] = f"{type(error).__name__}: {str(error).strip()[:500]}"
            continue
        row.update(told)
        found = [*told["error max, mean"], *told["later"]]
        if any(not e <= a for e, a in zip(found, [*allowed, *allowed], strict=True)):
            row["failed"] = f"wrong: {allowed} is allowed, so there is no speed of it"
            del runs[peer]
    for peer, times in time_in_turns(runs, case.x, options.seconds).items():
        for clock, found in times.items():
            rows[peer][f"{clock}, ms"] = round(statistics.median(found), 4)
            rows[peer][f"{clock}, least"] = round(min(found), 4)
    for row in rows.values():
        append_row(options, about, row)
    return not any("failed" in row for row in rows.values())


def main() -> None:
    """See the top of the file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    names = ("mlp", "resnet50", "gpt2")
    parser.add_argument("--models", nargs="+", default=names, choices=names)
    parser.add_argument("--peers", nargs="+", default=[*PEERS], choices=PEERS)
    parser.add_argument("--seconds", type=float, default=3, help="of timing a case")
    parser.add_argument("--json", help="append the rows to this file, one JSON object a line")
    options = parser.parse_args()
    torch._dynamo.config.recompile_limit = 64  # one code object, compiled for peer after peer
    torch._dynamo.config.automatic_dynamic_shapes = False
    os.environ["IPEX_HOME"] = tempfile.mkdtemp()  # nobody's records, and an empty kernel cache
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()
    about = describe_run()
    print(json.dumps(about), flush=True)
    right = [measure(options, case, about) for case in cases(options.models)]
    sys.exit(0 if all(right) else 1)


if __name__ == "__main__":
    main()
