"""Verify several ways to compute one result, then time them side by side with their noise.

A candidate is verified before it is timed. Rounds are interleaved, so that a slowdown of the
machine affects all candidates; the inputs of a call have left the caches by its next one, and move
in memory from block to block. The slower half drops out early and keeps its measurements; if noise
leaves the winner open, the race goes on.
"""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from ipex_inductor.autotune.pool import OF_MEDIAN, TIE_SHARE
from ipex_inductor.autotune.record import Choice, Outcome, Timing

Run = Callable[[Sequence[Tensor]], Tensor]
Round = Callable[[], float]  # one round of a candidate: microseconds a call

# Blocks of rounds that each stage of successive halving adds for the remaining candidates. In each
# block a candidate's inputs and results lie elsewhere in memory. That changes the time of kernels
# on an H200 by 0.3 to 3 %, which is most of the difference between two processes.
STAGES, ROUNDS = (1, 1, 2, 4), 8
FEWEST = 3  # rounds that every candidate needs for a result
KEPT = 2  # candidates that stay to the end at least: a winner needs a rival
# Candidates within this share of the fastest stay too: one block resolves a difference to 2 or 3 %
# only, so they may still tie.
NEAR = 0.08

# Then candidates that may tie with the fastest go on until that is decided by SURE standard errors,
# up to MOST blocks in all, which halve the noise that the stages leave, and LONGEST seconds: a
# difference that is still open then is worth little.
SURE, MOST, LONGEST = 3.0, 32, 5.0

# Errors that say nothing about a choice: memory belongs to the machine, and after an error of the
# device every call fails, so the process must end; its parent knows the running choice.
FATAL = (torch.OutOfMemoryError, torch.AcceleratorError)

PLACE = 0.01  # assumed relative change by a place in memory, with too few blocks to measure it
TOLD_BY = 4  # fewest blocks whose medians give the noise

# Tolerance of the largest error against fp64, in units of the largest value there: a multiple of
# the error of torch's own kernel, plus a number of roundings of the result's dtype.
ERRORS, ROUNDINGS = 4.0, 1.0
# Tolerance of the root mean square error, which a few elements that torch rounds badly cannot
# widen: a sum of a thousand products that lacks one of them exceeds it.
MEAN_ERRORS, MEAN_ROUNDINGS = 2.0, 0.25

# Properties that a result must share with torch's. The stride of a dimension with one element has
# no meaning.
SAME: Mapping[str, Callable[[Tensor], object]] = {
    "shape": lambda t: tuple(t.shape),
    "dtype": lambda t: t.dtype,
    "stride": lambda t: tuple(s for n, s in zip(t.shape, t.stride(), strict=True) if n > 1),
}


@dataclass(frozen=True)
class Candidate:
    """One way to compute the result from the inputs; `run` writes none of them.

    `takes` holds facts about the kernel for the outcome: registers, spills, shared_memory.
    """

    choice: Choice
    run: Run
    takes: Mapping[str, int] = field(default_factory=dict)


Place = Callable[[], Callable[[Run], Round]]  # allocates the inputs anew; returns how to time a run


class Clock(Protocol):
    """The interface of timers: how rounds of a candidate are timed on one kind of device."""

    def prepare(self, run: Run, buffers: Sequence[Sequence[Tensor]], sizes: int = 1) -> Round:
        """Return a warmed-up round over `buffers` that can be repeated.

        The buffers have `sizes` different sizes in turn, all weighted equally.
        """


class Judge:
    """The reference result, and the tolerance of a candidate's error.

    `exact` is computed in float64, `eager` by torch's own kernels in the required dtype and layout.
    Elements that are not finite in either are ignored. Raises `ValueError` if that leaves less than
    a quarter.
    """

    def __init__(self, exact: Tensor, eager: Tensor) -> None:
        self.eager = eager
        exact = exact.double()
        self._judged = exact.isfinite() & eager.isfinite()
        self._exact = exact[self._judged]
        if 4 * self._exact.numel() < exact.numel():
            raise ValueError("what it computes of random numbers is hardly ever finite")
        self._unit = float(self._exact.abs().max()) if self._exact.numel() else 1.0
        self._unit = self._unit or 1.0
        is_float = eager.dtype.is_floating_point
        # Either integer beside a tie is right.
        rounding = torch.finfo(eager.dtype).eps if is_float else 1.0 / self._unit
        largest, mean = self._errors(eager)
        self.tolerance = ERRORS * largest + ROUNDINGS * rounding
        self._mean_tolerance = MEAN_ERRORS * mean + MEAN_ROUNDINGS * rounding

    def error(self, result: Tensor) -> float:
        """Return the largest error in units of the largest exact value; NaN if there is a NaN."""
        return self._errors(result)[0]

    def why_wrong(self, result: Tensor) -> str | None:
        """Return the defect of `result`; None if it may be used."""
        for what, of in SAME.items():
            got, want = of(result), of(self.eager)
            if got != want:
                return f"its {what} is {got}, not {want}"
        largest, mean = self._errors(result)
        if not largest <= self.tolerance:  # NaN is wrong too
            return f"wrong by {largest:.3g} where {self.tolerance:.3g} is allowed"
        if not mean <= self._mean_tolerance:
            return f"wrong by {mean:.3g} on average where {self._mean_tolerance:.3g} is allowed"
        return None

    def _errors(self, result: Tensor) -> tuple[float, float]:
        """Return the largest error and the root mean square error."""
        off = (result.double()[self._judged] - self._exact) / self._unit
        if not off.numel():
            return 0.0, 0.0
        return float(off.abs().max()), float(off.square().mean().sqrt())


@dataclass
class Runner:
    """A candidate in the race and its rounds so far; or the reason why it cannot be timed."""

    candidate: Candidate
    error: float
    blocks: list[list[float]] = field(default_factory=list)
    failure: str = ""

    def p50(self, blocks: int | None = None) -> float:
        """Return the median of the first `blocks` blocks, or of all."""
        return statistics.median(itertools.chain(*self.blocks[:blocks]))


def verify_candidate(
    candidate: Candidate, judge: Judge, inputs: Sequence[Tensor]
) -> Outcome | float:
    """Return the error of the candidate's result, or the outcome with the reason to reject it.

    The candidate gets copies of `inputs`, so that it cannot change the inputs of other candidates.
    """
    copies = [copy(t) for t in inputs]
    try:
        result = candidate.run(copies)
    except FATAL:
        raise
    except Exception as error:
        return Outcome(candidate.choice, reason=first_line(error))
    reason = judge.why_wrong(result)
    if reason is None and not all(map(_same, inputs, copies)):
        reason = "it writes its inputs"
    if reason is not None:
        error_found = judge.error(result) if result.shape == judge.eager.shape else math.nan
        finite_error = error_found if math.isfinite(error_found) else None
        return Outcome(
            candidate.choice, reason=reason, error=finite_error, tolerance=judge.tolerance
        )
    return judge.error(result)


def race(
    runners: Sequence[Runner],
    place: Place,
    *,
    stages: Sequence[int] = STAGES,
    most: int = MOST,
    deadline: float = math.inf,
    say: Callable[[Runner], None] = lambda runner: None,
) -> None:
    """Time `runners` in turn; the slower half drops out after each stage.

    After the last stage, candidates that may still win go on. No round but the first few starts
    after the deadline. If memory runs out, the race ends with the complete rounds so far; only in
    the first block is `torch.OutOfMemoryError` raised, as no candidate is at fault.

    Args:
        runners: the verified candidates; their blocks are filled in.
        place: allocates the inputs of a block anew, and returns how to time a run on them.
        stages: blocks that each stage adds.
        most: blocks of a candidate in all.
        deadline: a time of `time.monotonic`.
        say: called with the runner that runs next.
    """
    running, until = list(runners), deadline
    ends = [*itertools.accumulate(stages)]
    for done in range(most):
        if not running or (done and time.monotonic() >= until):
            return
        try:
            running = _block(running, place(), 0 if done else FEWEST, deadline, say)
        except torch.OutOfMemoryError:
            if not done:
                raise
            for runner in runners:  # a block that ended before its first round
                runner.blocks = [block for block in runner.blocks if block]
            return
        if done + 1 in ends:
            running = _fast(running)
        if done + 1 == ends[-1]:
            until = min(deadline, time.monotonic() + LONGEST)
        if done + 1 >= ends[-1]:
            running = _find_undecided(running)


def timings(runners: Sequence[Runner]) -> list[Timing]:
    """Return the timing of each runner of a race.

    A candidate that dropped out early ran at other times and at fewer memory places than one that
    stayed. So its times are scaled by the drift of the others, and with few blocks its noise
    includes the variation between places that the others show.
    """
    most = max(len(r.blocks) for r in runners)
    stayed = [r for r in runners if len(r.blocks) == most]
    place = statistics.median(map(_of_place, stayed))
    return [_summarize_times(runner, stayed, place) for runner in runners]


def noise_of(blocks: Sequence[Sequence[float]], place: float) -> float:
    """Return the relative standard error of the median of all rounds in `blocks`.

    It follows from the medians of the blocks; with few blocks, from their rounds and from `place`,
    the relative change by another place in memory.
    """
    if len(blocks) >= TOLD_BY:
        return OF_MEDIAN * _of_blocks(blocks) / math.sqrt(len(blocks))
    times = [*itertools.chain(*blocks)]
    if len(times) < 2:
        return 1.0  # one round says nothing of the noise
    noise = OF_MEDIAN * statistics.stdev(times) / math.sqrt(len(times)) / statistics.median(times)
    return math.hypot(noise, place / math.sqrt(len(blocks)))


def _block(
    running: Sequence[Runner],
    prepare: Callable[[Run], Round],
    fewest: int,
    deadline: float,
    say: Callable[[Runner], None],
) -> list[Runner]:
    """Time one more block of the runners; return the ones that can be timed.

    Args:
        running: the runners still in the race.
        prepare: prepares a round of a run at this place in memory.
        fewest: rounds to run even after the deadline.
        deadline: a time of `time.monotonic`.
        say: called with the runner that runs next.
    """
    rounds: list[tuple[Runner, Round]] = []
    for runner in running:
        say(runner)
        try:
            rounds.append((runner, prepare(runner.candidate.run)))
        except FATAL:
            raise
        except Exception as error:
            runner.failure = f"it cannot be timed: {first_line(error)}"
    for runner, _ in rounds:
        runner.blocks.append([])
    for number in range(ROUNDS):
        if number >= max(1, fewest) and time.monotonic() >= deadline:
            break
        turn = number % max(1, len(rounds))
        for runner, round in [*rounds[turn:], *rounds[:turn]]:  # rotated, so predecessors vary
            say(runner)
            runner.blocks[-1].append(round())
    return [runner for runner, _ in rounds]


def _fast(running: Sequence[Runner]) -> list[Runner]:
    """Return the faster half, and the runners near the fastest."""
    ordered = sorted(running, key=Runner.p50)
    half = max(KEPT, len(ordered) // 2)
    near = ordered[0].p50() * (1 + NEAR) if ordered else 0.0
    return [r for i, r in enumerate(ordered) if i < half or r.p50() <= near]


def _find_undecided(running: Sequence[Runner]) -> list[Runner]:
    """Return the fastest and the runners that may tie with it; none once all are decided."""
    fastest = min(running, key=Runner.p50, default=None)
    undecided = [r for r in running if fastest and r is not fastest and not _is_decided(fastest, r)]
    return [fastest, *undecided] if fastest and undecided else []


def _is_decided(fastest: Runner, rival: Runner) -> bool:
    """Return True if more blocks would hardly change whether `rival` ties with the fastest.

    A library call that is the fastest wins unless it loses by more than a tie. Blocks are compared
    in pairs, so that a slowdown of both at one place cancels.
    """
    pairs = zip(fastest.blocks, rival.blocks, strict=True)
    effects = [math.log(statistics.median(b) / statistics.median(a)) for a, b in pairs]
    if len(effects) < 2:
        return False
    error = OF_MEDIAN * statistics.stdev(effects) / math.sqrt(len(effects))
    edge = TIE_SHARE if fastest.candidate.choice.kind != "library" else -TIE_SHARE
    return abs(math.log(rival.p50() / fastest.p50()) - edge) > SURE * error


def _summarize_times(runner: Runner, stayed: Sequence[Runner], place: float) -> Timing:
    """Return the timing of a runner, its times scaled by the drift of the runners that stayed."""
    count = len(runner.blocks)
    drift = statistics.median(r.p50() / r.p50(count) for r in stayed)
    ordered = sorted(time * drift for time in itertools.chain(*runner.blocks))
    p20, p50, p80 = (_percentile(ordered, share) for share in (0.2, 0.5, 0.8))
    return Timing(p20, p50, p80, len(ordered), noise_of(runner.blocks, place))


def _of_place(runner: Runner) -> float:
    """Return the relative change between places in memory; `PLACE` with too few blocks."""
    return _of_blocks(runner.blocks) if len(runner.blocks) >= TOLD_BY else PLACE


def _of_blocks(blocks: Sequence[Sequence[float]]) -> float:
    """Return the relative standard deviation of the medians of blocks."""
    medians = [*map(statistics.median, blocks)]
    return statistics.stdev(medians) / statistics.median(medians)


def _percentile(ordered: Sequence[float], share: float) -> float:
    """Return a percentile of sorted values by linear interpolation, as numpy does."""
    at = share * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


def copy(tensor: Tensor) -> Tensor:
    """Return a copy with the tensor's strides; expanded dimensions stay expanded."""
    stride = tensor.stride()
    size = [n if step else min(n, 1) for n, step in zip(tensor.shape, stride, strict=True)]
    result = torch.empty_strided(size, stride, dtype=tensor.dtype, device=tensor.device)
    return result.copy_(tensor.as_strided(size, stride)).expand(tensor.shape)


def _same(before: Tensor, after: Tensor) -> bool:
    """Return True if the tensors are bitwise equal, so that NaN equals itself."""
    flat = (t.contiguous().reshape(-1).view(torch.uint8) for t in (before, after))
    return torch.equal(*flat)


def first_line(error: Exception) -> str:
    """Return the type and first line of an error, at most 500 characters."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].strip() if lines else ''}"[:500]
