"""Compare 43 small whole models of seven families: backend `ipex` and Inductor.

    python -m benchmarks zoo [--models NAME ...] [--family NAME ...] [--device cpu|cuda]
        [--dtype fp32 bf16 fp16] [--train] [--inference] [--static] [--dynamic] [--all]
        [--minutes M] [--shard I/N] [--seconds S] [--threads N] [--workers N] [--json FILE]
        [--resume]

A row is a model in one variant: inference, or a training step (forward, loss, backward); in fp32,
or in bf16 (inference of a model cast to it, training under autocast); its batch static or dynamic.
If none is named, each model has one row of inference and one of training, so that each family has
all eight variants: first one row of each model, by turns inference and training, then the others.
`--all` has all eight of each model. No row is begun that would end after `--minutes` (30, on a GPU
10; 0 for no limit); how many were not reached is said. `--resume` leaves out rows that FILE has of
these sources on this device.

What a backend computes is held against fp64, and may be off by what eager is off by, by the rule of
`torch._dynamo.utils.same`; shapes, dtypes and strides are eager's. With a dynamic batch a second
batch size is computed and held as well. A backend whose result is wrong gets no speed. A graph that
falls back to plain Inductor counts as a failure. On a CPU a call's time is the minimum of the
process's processor time over interleaved rounds, on a GPU the minimum of blocks between events. A
row below the bound is measured again, with models compiled anew, before it counts as slow.
Kernels that both backends write alike are compiled once (`zoo_models/compiled_once.py`), and on a
GPU `--workers` processes compile all rows, for less than half of the time, before any is timed. So
first calls say nothing: `cold_start.py` measures those. `seconds` is what a row took.
"""

import argparse
import contextlib
import copy
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from zoo_models import FAMILIES, MODELS, compiled_once
from zoo_models.entry import Entry
from zoo_models.rows import Variant, chosen, shard, without_known
from zoo_models.verdict import Groups, Verdict

from common.cpu_peer import time_calls
from common.gpu_peers import append_row, describe_run, time_in_turns
from ipex_inductor.cli.demo import measure as demo_measure
from ipex_inductor.reporting import decisions

BOUND = 0.97  # of Inductor's speed: below it a row is slow
REPEATS = 2  # a row below the bound is measured so many times more
MINUTES = {"cpu": 30.0, "cuda": 10.0}
PREPARING = 0.45  # of the time, in which workers compile
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PEERS = {"inductor": "inductor", "ipex": "ipex"}


class Step(nn.Module):
    """A model in train mode with its loss; if `dtype` has 16 bits, it runs under autocast."""

    def __init__(self, model: nn.Module, entry: Entry, dtype: torch.dtype) -> None:
        super().__init__()
        self.model, self.loss, self.dtype = model, entry.loss, dtype

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the loss."""
        lowered = self.dtype.itemsize == 2
        dtype = self.dtype if lowered else None
        with torch.autocast(inputs[0].device.type, dtype, enabled=lowered):
            outputs = self.model(*inputs)
        return self.loss(outputs)


@dataclass
class Case:
    """A model in one variant, as eager runs it, and its inputs at one or two batch sizes."""

    model: nn.Module
    inputs: list[tuple[Tensor, ...]]
    variant: Variant

    @classmethod
    def of(cls, entry: Entry, variant: Variant, device: str) -> "Case":
        """Make it, with the same weights and inputs each time."""
        torch.manual_seed(0)
        model = entry.make().to(device)
        dtype = DTYPES[variant.dtype]
        model = Step(model.train(), entry, dtype) if variant.training else model.eval().to(dtype)
        inputs = []
        for batch in (entry.batch, entry.batch + 3)[: 1 + variant.dynamic]:
            made = (x.to(device) for x in entry.inputs(batch))
            inputs.append(tuple(made if variant.training else (_cast(x, dtype) for x in made)))
        return cls(model, inputs, variant)

    def exact(self) -> Groups:
        """Return what the same weights compute in fp64."""
        model = copy.deepcopy(self.model).double()
        if isinstance(model, Step):
            model.dtype = torch.float64
        inputs = [tuple(_cast(x, torch.float64) for x in each) for each in self.inputs]
        return computed(model, model, inputs)

    def marked(self) -> tuple[Tensor, ...]:
        """Return the inputs to compile with, whose first dimension may be marked as dynamic."""
        for x in self.inputs[0] if self.variant.dynamic else ():
            torch._dynamo.maybe_mark_dynamic(x, 0)
        return self.inputs[0]


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if x.is_floating_point() else x


def one_step(run: Callable[..., Any], model: nn.Module, inputs: tuple[Tensor, ...]) -> Any:
    """Return the results, or after the backward pass the loss."""
    if not isinstance(model, Step):
        with torch.no_grad():
            return run(*inputs)
    for p in model.parameters():
        p.grad = None
    loss = run(*inputs)
    loss.backward()
    return loss.detach()


def computed(run: Callable[..., Any], model: nn.Module, inputs: list[tuple[Tensor, ...]]) -> Groups:
    """Return results, and in training gradients and buffers, of a call for each batch size."""
    groups: Groups = {"results": [], "gradients": [], "buffers": []}
    for each in inputs:
        groups["results"] += tree_leaves(one_step(run, model, each))
        groups["gradients"] += [p.grad for p in model.parameters() if p.grad is not None]
    if isinstance(model, Step):  # running statistics
        groups["buffers"] = [b.clone() for b in model.buffers() if b.is_floating_point()]
    return {name: tensors for name, tensors in groups.items() if tensors}


@dataclass
class Peer:
    """A compiled copy of a case's model, and what it computed first."""

    case: Case
    run: Callable[..., Any]
    model: nn.Module
    results: Groups

    @classmethod
    def of(cls, name: str, case: Case, folder: Path) -> "Peer":
        """Compile and call it once for each batch size."""
        demo_measure.use_folder(folder / name, PEERS[name])
        model = copy.deepcopy(case.model)
        run = torch.compile(model, backend=PEERS[name])
        one_step(run, model, case.marked())
        model.load_state_dict(case.model.state_dict())  # running statistics moved
        return cls(case, run, model, computed(run, model, case.inputs))

    def call(self) -> Any:
        """Run one step at the usual batch size."""
        return one_step(self.run, self.model, self.case.inputs[0])


def processor_time(run: Callable[[], Any], count: int) -> float:
    """Return the least milliseconds of this process's processor time of one of so many calls."""
    return min(used for _, used in time_calls(run, count))


def race(peers: dict[str, Peer], seconds: float, device: str) -> dict[str, float]:
    """Return the least milliseconds of a call of each peer, timed in turns."""
    calls = {name: peer.call for name, peer in peers.items()}
    clock = {"timed": processor_time, "length": 10} if device == "cpu" else {}
    return {name: min(times) for name, times in time_in_turns(calls, seconds, **clock).items()}


def measure(name: str, variant: Variant, options: argparse.Namespace) -> dict[str, Any]:
    """Return one row of the table: errors, times, what was fired, and what failed."""
    begin = time.monotonic()
    case = Case.of(MODELS[name], variant, options.device)
    family = next(family for family, models in FAMILIES.items() if name in models)
    row: dict[str, Any] = {"family": family, "model": name, **asdict(variant)}
    row["shapes"] = [[*x.shape] for x in case.inputs[0]]
    exact = case.exact()
    eager_model = copy.deepcopy(case.model)
    eager = computed(eager_model, eager_model, case.inputs)
    failed: dict[str, str] = {}
    best: dict[str, float] = {}
    for turn in range(1 + REPEATS):
        torch.compiler.reset()
        peers: dict[str, Peer] = {}
        for peer in PEERS:
            decisions.clear()
            try:
                peers[peer] = Peer.of(peer, case, options.folder)
            except Exception as error:  # one peer's fault is not the other's
                failed[peer] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
                continue
            verdict = Verdict.of(peers[peer].results, eager, exact, variant.dtype)
            if verdict.wrong:
                failed[peer] = f"wrong: {verdict.wrong}"
                peers.pop(peer)
            if turn == 0:
                row[f"{peer} error"], row["limit"] = verdict.error, verdict.limit
        if turn == 0:
            row |= decided()
        if not peers or "ipex" not in peers:
            break
        for peer, ms in race(peers, options.seconds * (1 + turn), options.device).items():
            best[peer] = min(ms, best.get(peer, math.inf))
        if len(best) < len(PEERS) or best["inductor"] / best["ipex"] >= BOUND:
            break
    row |= {f"{peer}, ms": round(ms, 4) for peer, ms in best.items()}
    if len(best) == len(PEERS):
        row["ratio"] = round(best["inductor"] / best["ipex"], 4)
    if row.get("fallback"):
        failed.setdefault("ipex", f"fell back: {row['fallback']}")
    row["seconds"] = round(time.monotonic() - begin, 1)
    return row | {f"{peer} failed": why for peer, why in failed.items()}


def decided() -> dict[str, Any]:
    """Return what the reports since the last `clear` say: graphs, rules, why one fell back."""
    events = [event for report in decisions.reports() for event in report.events]
    fired = [event.subject for event in events if event.kind == "fired"]
    reasons = sorted({event.reason for event in events if event.kind == "fallback"})
    told = {
        "graphs": len(decisions.reports()),
        "fired": {n: fired.count(n) for n in sorted({*fired})},
    }
    return told | ({"fallback": "; ".join(reasons)} if reasons else {})


def line_of(row: dict[str, Any]) -> str:
    """Return the row as one line of the table."""
    variant = Variant(row["training"], row["dtype"], row["dynamic"])

    def pair(form: str, what: str) -> str:
        values = (row.get(f"{peer}{what}") for peer in ("ipex", "inductor"))
        return " ".join(
            "-".rjust(len(f"{0:{form}}")) if v is None else f"{v:{form}}" for v in values
        )

    cells = [f"{row['model']:21}", f"{variant!s:23}", pair("8.1e", " error"), pair("8.3f", ", ms")]
    cells += [f"{row['ratio']:6.3f}" if "ratio" in row else f"{'-':>6}"]
    cells += [f"{sum(row.get('fired', {}).values()):5}", f"{row.get('seconds', 0):7.1f}"]
    cells += [f"{peer}: {row[f'{peer} failed']}" for peer in PEERS if f"{peer} failed" in row]
    return "  ".join(cells)


TITLES = "error: ipex, Ind.", "ms: ipex, Ind.", " ratio", "fired", "seconds"
HEAD = "  ".join([f"{'model':21}", f"{'variant':23}", *(f"{title:17}" for title in TITLES[:2])])
HEAD = "  ".join([HEAD, *TITLES[2:]])


def summary(rows: list[dict[str, Any]]) -> str:
    """Return what is wrong, what is slow, and the geometric mean of each family's ratios."""
    lines = [line_of(row) for row in rows if "ipex failed" in row]
    lines = ["wrong or failed:", *lines] if lines else []
    slow = sorted((r for r in rows if r.get("ratio", 1) < BOUND), key=lambda row: row["ratio"])
    lines += [f"below {BOUND} of Inductor's speed:", *map(line_of, slow)] if slow else []
    for family in FAMILIES:
        ratios = [row["ratio"] for row in rows if row["family"] == family and "ratio" in row]
        if ratios:
            mean = statistics.geometric_mean(ratios)
            lines.append(
                f"{family:15} rows {len(ratios):3}  mean {mean:.3f}  least {min(ratios):.3f}"
            )
    return "\n".join(lines)


def parsed() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS], metavar="NAME")
    parser.add_argument("--family", nargs="+", choices=FAMILIES, default=[*FAMILIES])
    parser.add_argument("--device", choices=MINUTES, default=demo_measure.default_device())
    parser.add_argument("--dtype", nargs="+", choices=DTYPES)
    for word in ("train", "inference", "static", "dynamic", "all", "resume"):
        parser.add_argument(f"--{word}", action="store_true")
    parser.add_argument("--minutes", type=float, help="0 for no limit")
    parser.add_argument("--shard", type=shard, default=(0, 1), metavar="I/N", help="from 1/N on")
    parser.add_argument("--seconds", type=float, default=1, help="of timing a row, at least")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--workers", type=int, help="0: none; on a GPU one for a core but two")
    # A worker compiles its part of the rows into a folder.
    parser.add_argument("--prepare", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--part", type=shard, default=(0, 1), help=argparse.SUPPRESS)
    parser.add_argument("--json", help="append the rows to this file, one JSON object a line")
    options = parser.parse_args()
    limit = MINUTES[options.device] if options.minutes is None else options.minutes
    begin = time.monotonic()
    options.end = begin + 60 * limit if limit else math.inf
    options.end_of_workers = begin + PREPARING * 60 * limit if limit else math.inf
    if options.workers is None:
        options.workers = max((os.cpu_count() or 1) - 2, 0) if options.device == "cuda" else 0
    return options


def start(options: argparse.Namespace) -> None:
    """Pay what a process pays once, whatever the model."""
    torch.set_num_threads(options.threads)
    # One code object is compiled for both backends, at the sizes that it is given.
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.automatic_dynamic_shapes = False
    if options.device == "cpu":
        from torch._inductor import config

        config.cpp.cxx = (None, compiled_once.install(options.folder))
    for name in PEERS:
        demo_measure.use_folder(options.folder / name, PEERS[name])
        tiny = demo_measure.Tiny().eval().to(options.device)
        with torch.no_grad():
            torch.compile(tiny, backend=PEERS[name])(
                torch.ones(1, 3, 16, 16, device=options.device)
            )


def prepare(name: str, variant: Variant, options: argparse.Namespace) -> None:
    """Compile a row by all peers, for the caches alone."""
    torch.compiler.reset()
    case = Case.of(MODELS[name], variant, options.device)
    for peer in PEERS:
        with contextlib.suppress(Exception):  # which the row that is measured will say
            Peer.of(peer, case, options.folder)


def run_workers(options: argparse.Namespace) -> None:
    """Have processes compile the rows, each a share of them, until time is up."""
    command = [sys.executable, *sys.argv, "--prepare", str(options.folder)]
    workers = [
        subprocess.Popen(
            [*command, "--part", f"{n + 1}/{options.workers}"],
            env={**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for n in range(options.workers)
    ]
    for worker in workers:
        left = options.end_of_workers - time.monotonic()
        try:
            worker.wait(None if math.isinf(left) else max(left, 0))
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()


def main() -> None:
    """Measure the rows; ends with 1 if ours is wrong or slow, fell back, or a model has no row."""
    options = parsed()
    about = describe_run("transformers", device=options.device)
    about["threads"] = str(options.threads)
    rows: list[dict[str, Any]] = []
    todo = without_known(chosen(options), options, about)
    with tempfile.TemporaryDirectory() as folder:
        options.folder = options.prepare or Path(folder)
        start(options)
        if options.prepare:
            index, count = options.part
            for name, variant in todo[index::count]:
                prepare(name, variant, options)
            return
        run_workers(options)
        print(HEAD, flush=True)
        for name, variant in todo:
            longest = max((row["seconds"] for row in rows[-8:]), default=0)
            if time.monotonic() + longest > options.end:
                break
            rows.append(measure(name, variant, options))
            append_row(options, about, rows[-1], line_of(rows[-1]))
    print(summary(rows))
    if left := todo[len(rows) :]:
        print(f"not reached: {len(left)} of {len(todo)} rows")
    missing = {name for name, _ in todo} - {row["model"] for row in rows}
    bad = any("ipex failed" in row or row.get("ratio", 1) < BOUND for row in rows)
    sys.exit(1 if bad or missing else 0)


if __name__ == "__main__":
    main()
