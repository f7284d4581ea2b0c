"""Measure library calls for problems without a record, while their graph compiles.

It runs in the user's process, before the graph is lowered. The candidates are calls that torch
itself makes, so nothing is compiled and nothing may crash that could not crash in eager mode.
Inductor's default is timed as its library kernel and one eager kernel that moves the bytes of
Inductor's epilogue. Templates are left to the tuner: compiling one takes longer than the budget.

Results are ordinary records in a folder of their own. They have not seen templates and come from a
short race, so neither the tuner nor the lookup of records takes them for its own.
"""

import contextlib
import logging
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ipex_inductor import compat
from ipex_inductor.aot_cache import cache_root
from ipex_inductor.autotune import database, measure, merging, timers
from ipex_inductor.autotune.database import Records
from ipex_inductor.autotune.measure import Candidate, Clock, Judge, Runner
from ipex_inductor.autotune.pool import Estimate, pool
from ipex_inductor.autotune.record import Choice, Outcome, Problem, Record, encode
from ipex_inductor.autotune.select import Selection
from ipex_inductor.lowerings.common.calls import Call
from ipex_inductor.lowerings.problem.provenance import provenance_of
from ipex_inductor.lowerings.problem.selector_hook import Offer
from ipex_inductor.lowerings.problem.workload import function_of, inputs_of, to_float64
from ipex_inductor.lowerings.select import library, peaks
from ipex_inductor.lowerings.tune import epilogue_stand_in as stand_in

log = logging.getLogger("ipex_inductor")

SOURCE = "measured at the first call"
SPENT = "the budget of the first call is spent"
FOLDER = "first_calls"  # beside the database of records in `home()`

# The budget: a share of the compile time, of which these passes end the first part. The whole is
# taken to be so many times as long as the part.
SHARE, PARTS = 0.1, 3.0
LEAST_SHARE = 0.01  # of the estimated time of all ops with a choice: less is not worth measuring
# A call must be faster than the default by this share, and by so many standard errors.
MARGIN, SURE = 0.05, 3.0
STAGES, MOST_BLOCKS = (1,), 2  # of a race, see `measure.race`
MOST_SETS = 16  # of inputs
MOST_FILES = 32  # of records: each process reads all of them, and each graph adds one
FREE_SHARE = 0.25  # of the free memory that inputs and results may take


@dataclass(frozen=True)
class Measured:
    """The outcome of `FirstCall.measure`.

    Attributes:
        selections: selection for each encoded problem with a measurement, now or earlier.
        reasons: why an encoded problem was not measured.
        summary: what was measured and how long it took; "" if nothing was.
    """

    selections: dict[bytes, Selection]
    reasons: dict[bytes, str]
    summary: str = ""


@dataclass(frozen=True)
class FirstCall:
    """Measure for one graph. `began` is when its compilation began, on the clock `now`."""

    clock_of: Callable[[torch.device], Clock] = timers.queued_clock_of
    now: Callable[[], float] = time.monotonic
    began: float = field(default_factory=time.monotonic)

    def measure(
        self, offers: Mapping[bytes, Offer], unselected: Collection[bytes], device: torch.device
    ) -> Measured:
        """Return selections of problems that no other source has one for.

        Those that take most of the graph's time are measured first, until the budget is spent.

        Args:
            offers: offers of all ops with a choice of the graph, by encoded problem.
            unselected: the keys in `offers` of problems without a selection.
            device: device of the graph.
        """
        measured = Measured(_load_selections(unselected), {})
        seconds = _estimate_seconds(offers)
        least = LEAST_SHARE * math.fsum(seconds.values())
        pending = []
        for key in sorted(unselected - measured.selections.keys(), key=lambda k: (-seconds[k], k)):
            reason = why_not(offers[key].problem)
            if not reason and seconds[key] < least:
                reason = f"it takes less than {LEAST_SHARE:.0%} of the estimated time"
            if reason:
                measured.reasons[key] = reason
            else:
                pending.append(key)
        if not pending:
            return measured
        return self._measure_pending({key: offers[key] for key in pending}, measured, device)

    def _measure_pending(
        self, pending: Mapping[bytes, Offer], measured: Measured, device: torch.device
    ) -> Measured:
        """Return `measured` with the selections of `pending`, which are measured in their order."""
        start = self.now()
        budget = SHARE * PARTS * (start - self.began)
        records: list[Record] = []
        provenance = provenance_of(device)
        for key, offer in pending.items():
            result: list[Outcome] | str = SPENT
            if (seconds := budget - (self.now() - start)) > 0:
                result = self._try_problem(offer, device, seconds)
            if isinstance(result, str):
                measured.reasons[key] = result
            else:
                records.append(Record(offer.problem, tuple(result), provenance))
        _release_memory(device)
        _store(records)
        measured.selections.update(_select_by(records))
        summary = (
            f"{len(records)} of {len(pending)} problems without a record in "
            f"{self.now() - start:.2f} s, of {budget:.2f} s"
        )
        return Measured(measured.selections, measured.reasons, summary)

    def _try_problem(
        self, offer: Offer, device: torch.device, seconds: float
    ) -> list[Outcome] | str:
        """Return the outcomes of a problem's library calls, or the reason for their lack."""
        try:
            with _as_eager(device):
                return self._measure_problem(offer, device, time.monotonic() + seconds)
        except torch.AcceleratorError:
            raise  # the device is unusable
        except Exception as error:  # the default serves
            return f"it cannot be measured: {measure.first_line(error)}"

    def _measure_problem(
        self, offer: Offer, device: torch.device, deadline: float
    ) -> list[Outcome] | str:
        """Verify the library calls of a problem, time the right ones, and return the outcomes.

        The result is a reason if verifying took until the deadline.

        Args:
            offer: problem and default.
            device: device to measure on.
            deadline: time of `time.monotonic`, after which a race runs only its first rounds.

        Raises:
            ValueError: it would take too much memory, or the default could not be timed.
        """
        problem = offer.problem
        calls = cheap_calls(problem)
        sets = _count_sets(problem, device)
        inputs = inputs_of(problem, device, seed=0)
        with _keep_from_searching():
            judge = _judge(problem, inputs)
        outcomes, runners = _verify(problem, calls, inputs, judge)
        if time.monotonic() >= deadline:
            return SPENT
        buffers = [inputs, *([*map(measure.copy, inputs)] for _ in range(sets - 1))]
        clock = self.clock_of(device)
        measure.race(
            runners,
            lambda: lambda run: clock.prepare(run, buffers),
            stages=STAGES,
            most=MOST_BLOCKS,
            deadline=deadline,
        )
        outcomes += _outcomes(problem, runners, judge.tolerance)
        if not any(o.timing for o in outcomes if o.choice == offer.taken):
            raise ValueError(f"{offer.taken.name} could not be timed")
        return outcomes


def why_not(problem: Problem) -> str:
    """Return why a problem is not measured at a first call, or ""."""
    if problem.op not in stand_in.PRODUCTS:
        return f"{problem.op} is not measured at a first call"
    if problem.symbols:
        return "its sizes vary"
    if problem.epilogue:
        return "Inductor may fuse what follows, which is not measured at a first call"
    if len(cheap_calls(problem)) < 2:
        return "no library call competes with the default"
    return ""


def cheap_calls(problem: Problem) -> list[Call]:
    """Return the library calls of a problem that need no compilation, the default first."""
    return [
        call
        for call in library.calls(problem)
        if not (call.parameters or call.apart or call.arrange)
    ]


def select_call(estimates: Sequence[Estimate], default: Choice) -> Selection | None:
    """Return the fastest choice, or the default unless it is beaten beyond margin and noise.

    The result is None without a time of the default.
    """
    defaults = [estimate for estimate in estimates if estimate.choice == default]
    if not defaults:
        return None
    (of_default,) = defaults
    best = min(estimates, key=lambda e: (e.p50, encode(e.choice)))
    needed = max(MARGIN, SURE * best.noise_against(of_default))
    wins = best.effect(of_default) > needed
    return Selection(best if wins else of_default, of_default, SOURCE)


def _load_selections(keys: Collection[bytes]) -> dict[bytes, Selection]:
    """Return the selections of problems that this torch measured at an earlier first call."""
    records_folder = folder()
    if not records_folder.exists() or not cache_root.state(records_folder).private:
        return {}
    lines = [r for r in Records(records_folder, only=keys) if r.provenance.torch == compat.VERSION]
    return _select_by(lines)


def _select_by(lines: Sequence[Record]) -> dict[bytes, Selection]:
    """Return the selections by records of first calls, by encoded problem."""
    defaults = {encode(r.problem): library.CALLS[r.problem.op][0].choice for r in lines}
    selections = {
        key: select_call([*pooled.estimates().values()], defaults[key])
        for key, pooled in pool(lines).items()
    }
    return {key: selection for key, selection in selections.items() if selection is not None}


def folder() -> Path:
    """Return the folder of the records of first calls; it may not exist."""
    return cache_root.home() / FOLDER


def _estimate_seconds(offers: Mapping[bytes, Offer]) -> dict[bytes, float]:
    """Return a lower bound of the seconds that the problems of a graph take in all."""
    with _disable_current_modes():  # it counts bytes and operations in a mode of its own
        return {key: offer.times * peaks.floor(offer.problem) for key, offer in offers.items()}


def _judge(problem: Problem, inputs: Sequence[Tensor]) -> Judge:
    """Return the reference for the first and the last row of the result.

    An fp64 convolution of all rows would take most of the budget.
    """
    rows = stand_in.rows_of_problem(problem)
    few = rows.of_operands(inputs)
    wide = [t.double() if t.is_floating_point() else t for t in few]
    exact = function_of(to_float64(problem), library.EXACT.get(problem.op))(*wide)
    return Judge(exact, rows.of_result(function_of(problem)(*inputs)))


def _verify(
    problem: Problem, calls: Sequence[Call], inputs: Sequence[Tensor], judge: Judge
) -> tuple[list[Outcome], list[Runner]]:
    """Return the outcomes of wrong calls, and runners of the right ones.

    All rows are computed, as they will be, and those of `judge` are compared.
    """
    rows = stand_in.rows_of_problem(problem)
    wrong: list[Outcome] = []
    runners: list[Runner] = []
    for call in calls:
        compute = function_of(problem, call.body)

        def run(operands: Sequence[Tensor], compute: Callable[..., Tensor] = compute) -> Tensor:
            return rows.of_result(compute(*operands))

        error = measure.verify_candidate(Candidate(call.choice, run), judge, inputs)
        if isinstance(error, Outcome):
            wrong.append(error)
        else:
            runners.append(
                Runner(Candidate(call.choice, stand_in.run_of_call(problem, call)), error)
            )
    return wrong, runners


def _outcomes(problem: Problem, runners: Sequence[Runner], tolerance: float) -> list[Outcome]:
    """Return the outcomes of a race."""
    timed = [r for r in runners if not r.failure]
    failed = [Outcome(r.candidate.choice, reason=r.failure) for r in runners if r.failure]
    outcomes = []
    for runner, timing in zip(timed, measure.timings(timed) if timed else [], strict=True):
        bandwidth, rate = peaks.shares([problem], timing.p50)
        outcomes.append(
            Outcome(
                runner.candidate.choice,
                timing,
                error=runner.error,
                tolerance=tolerance,
                bandwidth=bandwidth,
                rate=rate,
            )
        )
    return failed + outcomes


def _count_sets(problem: Problem, device: torch.device) -> int:
    """Return how many sets of inputs exceed the caches; raise `ValueError` for want of memory."""
    moved, _ = peaks.work(problem)
    sets = min(MOST_SETS, timers.buffers_against_caches(device, moved, fewest=1))
    # Beside the sets there are a copy for each verification, results, and rows in fp64.
    needed, free = (sets + 4) * moved, _free_bytes(device)
    if needed > FREE_SHARE * free:
        raise ValueError(f"{needed >> 20} MiB of {int(free) >> 20} MiB free would be taken")
    return sets


def _free_bytes(device: torch.device) -> float:
    if device.type == "cpu":
        return math.inf
    return float(getattr(torch, device.type).mem_get_info(device)[0])


def _release_memory(device: torch.device) -> None:
    """Give the memory of inputs and results back to the device."""
    if device.type != "cpu":
        getattr(torch, device.type).empty_cache()


@contextlib.contextmanager
def _keep_from_searching() -> Iterator[None]:
    """Let cuDNN choose by its heuristics, as its search costs more than a reference needs.

    `torch.backends.cudnn.flags` would change other settings too.
    """
    cudnn: Any = torch.backends.cudnn
    is_searching = cudnn.benchmark
    if is_searching:
        cudnn.benchmark = False
    try:
        yield
    finally:
        if is_searching:
            cudnn.benchmark = True


@contextlib.contextmanager
def _as_eager(device: torch.device) -> Iterator[None]:
    """Run torch's calls on real tensors of a device, without tracing, autocast or gradients."""
    autocast = torch.autocast(device.type, enabled=False)
    place = contextlib.nullcontext() if device.type == "cpu" else torch.cuda.device(device)
    with _disable_current_modes(), torch.no_grad(), autocast, place:
        yield


def _store(records: Sequence[Record]) -> None:
    """Write records to one file of the folder, and merge its files if there are too many.

    Without a usable folder, the next process measures again.
    """
    records_folder = folder()
    if not records or not cache_root.ensure(records_folder).usable:
        return
    try:
        database.add(records_folder, records)
        if sum(1 for _ in records_folder.glob(f"*{database.SUFFIX}")) > MOST_FILES:
            merging.compact(records_folder)
    except OSError as error:
        log.info("autotune: what the first call measured is not kept: %s", error)
