"""Several ways to compute one thing, verified and then timed side by side, with the noise of it.

A candidate is judged before its clock starts. Rounds are interleaved, so that whatever slows the
machine down slows all of them; the inputs of one call are long out of the caches at its next, and
move from block to block; the slow half drops out early, with what was measured of it; and where
noise leaves open who wins, it goes on.
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

# How many blocks of rounds a stage of successive halving adds for those that are still in. In each
# block what a candidate reads and writes lies elsewhere in memory, which changes what kernels of an
# H200 take by 0.3 to 3 %, and is most of what sets two processes apart.
STAGES, ROUNDS = (1, 1, 2, 4), 8
FEWEST = 3  # rounds of everybody, or there is nothing to say
KEPT = 2  # at least so many stay in to the end: a winner is one against something
# And what is within that share of the fastest: one block tells a difference to 2 or 3 % only,
# and it may still tie.
NEAR = 0.08

# Then those go on of whom it is open whether they tie with the fastest, until that is so many
# standard errors from being otherwise; to so many blocks in all, which halve the noise that the
# stages leave, and for no more than so many seconds: what is still open then is worth little.
SURE, MOST, LONGEST = 3.0, 32, 5.0

# What this process cannot blame a choice for: memory is the machine's, and after an error of the
# device every call fails, so that the process must end; its parent knows who was at work.
FATAL = (torch.OutOfMemoryError, torch.AcceleratorError)

PLACE = 0.01  # what one place in memory may change, relatively, where too few were tried to tell
TOLD_BY = 4  # blocks, and more: their medians tell the noise

# Of the result against the same computed in fp64, in units of the largest value there: so many
# times what torch's own kernel is off by, and so many roundings of the result's dtype.
ERRORS, ROUNDINGS = 4.0, 1.0
# The same of the root mean square, which no few elements that torch rounds badly can widen: a sum
# of a thousand products that lacks one of them is off by more.
MEAN_ERRORS, MEAN_ROUNDINGS = 2.0, 0.25

# What a result has in common with torch's. How far apart the elements of a dimension lie says
# nothing where there is but one.
SAME: Mapping[str, Callable[[Tensor], object]] = {
    "shape": lambda t: tuple(t.shape),
    "dtype": lambda t: t.dtype,
    "stride": lambda t: tuple(s for n, s in zip(t.shape, t.stride(), strict=True) if n > 1),
}


@dataclass(frozen=True)
class Candidate:
    """One way to compute the result from the inputs; `run` writes none of them.

    `takes` is what an outcome says of the kernel: registers, spills, shared_memory.
    """

    choice: Choice
    run: Run
    takes: Mapping[str, int] = field(default_factory=dict)


Place = Callable[[], Callable[[Run], Round]]  # inputs anew, and how to time a run on them


class Clock(Protocol):
    """How the rounds of a candidate are timed on one kind of device."""

    def prepare(self, run: Run, buffers: Sequence[Sequence[Tensor]], sizes: int = 1) -> Round:
        """A round over `buffers`, warm and ready to be repeated.

        They are of so many `sizes` in turns, all of which count alike.
        """


class Judge:
    """The result as it should be, and how far from it a candidate may be.

    `exact` is computed in float64, `eager` by torch's own kernels in the dtype and layout to be
    had. What either has no finite value for is not judged; if that is nearly all, `ValueError`.
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
        rounding = torch.finfo(eager.dtype).eps if eager.dtype.is_floating_point else 0.0
        largest, mean = self._errors(eager)
        self.tolerance = ERRORS * largest + ROUNDINGS * rounding
        self._mean_tolerance = MEAN_ERRORS * mean + MEAN_ROUNDINGS * rounding

    def error(self, result: Tensor) -> float:
        """The largest difference, in units of the largest exact value; NaN where one is."""
        return self._errors(result)[0]

    def why_wrong(self, result: Tensor) -> str | None:
        """What is wrong with `result`; None if it may be used."""
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
        """The largest error, and the root of the mean square."""
        off = (result.double()[self._judged] - self._exact) / self._unit
        if not off.numel():
            return 0.0, 0.0
        return float(off.abs().max()), float(off.square().mean().sqrt())


@dataclass
class Runner:
    """A candidate that is in the race, and its rounds so far; or why it cannot be timed."""

    candidate: Candidate
    error: float
    blocks: list[list[float]] = field(default_factory=list)
    failure: str = ""

    def p50(self, blocks: int | None = None) -> float:
        """The median of the first so many blocks, or of all."""
        return statistics.median(itertools.chain(*self.blocks[:blocks]))


def verified(candidate: Candidate, judge: Judge, inputs: Sequence[Tensor]) -> Outcome | float:
    """The error of what the candidate computes, or the outcome that says why it is out.

    It gets copies: what it may write is not what others are judged by.
    """
    given = [copy(t) for t in inputs]
    try:
        result = candidate.run(given)
    except FATAL:
        raise
    except Exception as error:
        return Outcome(candidate.choice, reason=first_line(error))
    reason = judge.why_wrong(result)
    if reason is None and not all(map(_same, inputs, given)):
        reason = "it writes its inputs"
    if reason is not None:
        error_found = judge.error(result) if result.shape == judge.eager.shape else math.nan
        known = error_found if math.isfinite(error_found) else None
        return Outcome(candidate.choice, reason=reason, error=known, tolerance=judge.tolerance)
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
    """Time `runners` in turns, the slow half of them dropping out after each stage.

    After the last one those go on of whom it is open who wins, to `most` blocks in all. Past
    `deadline` (of `time.monotonic`) nothing begins but the first few rounds, and nothing after a
    block for which memory was short, but that the first one raises `torch.OutOfMemoryError`. It is
    nobody's failure. `say` hears whose turn is next.
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
            running = _open(running)


def timings(runners: Sequence[Runner]) -> list[Timing]:
    """What the rounds of each of a race come to.

    Who dropped out early saw the machine at other times, and had fewer places in memory, than who
    stayed: its times are put in proportion, and its noise is as theirs would be.
    """
    most = max(len(r.blocks) for r in runners)
    stayed = [r for r in runners if len(r.blocks) == most]
    place = statistics.median(map(_of_place, stayed))
    return [_timing(runner, stayed, place) for runner in runners]


def noise_of(blocks: Sequence[Sequence[float]], place: float) -> float:
    """The standard error of the median of all rounds in `blocks`, relatively.

    From the medians of the blocks; where these are few from their rounds, and from what another
    `place` in memory changes.
    """
    if len(blocks) >= TOLD_BY:
        return OF_MEDIAN * _of_blocks(blocks) / math.sqrt(len(blocks))
    times = [*itertools.chain(*blocks)]
    if len(times) < 2:
        return 1.0  # nothing is known
    own = OF_MEDIAN * statistics.stdev(times) / math.sqrt(len(times)) / statistics.median(times)
    return math.hypot(own, place / math.sqrt(len(blocks)))


def _block(
    running: Sequence[Runner],
    prepare: Callable[[Run], Round],
    fewest: int,
    deadline: float,
    say: Callable[[Runner], None],
) -> list[Runner]:
    """One more block of all that can be timed at this place in memory; these are in."""
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
        for runner, round in [*rounds[turn:], *rounds[:turn]]:  # nobody always follows the same
            say(runner)
            runner.blocks[-1].append(round())
    return [runner for runner, _ in rounds]


def _fast(running: Sequence[Runner]) -> list[Runner]:
    """The faster half, and who is near the fastest."""
    ordered = sorted(running, key=Runner.p50)
    half = max(KEPT, len(ordered) // 2)
    near = ordered[0].p50() * (1 + NEAR) if ordered else 0.0
    return [r for i, r in enumerate(ordered) if i < half or r.p50() <= near]


def _open(running: Sequence[Runner]) -> list[Runner]:
    """The fastest, and who may or may not tie with it; nobody once all of that is settled."""
    fastest = min(running, key=Runner.p50, default=None)
    others = [r for r in running if fastest and r is not fastest and not _settled(fastest, r)]
    return [fastest, *others] if fastest and others else []


def _settled(fastest: Runner, other: Runner) -> bool:
    """Whether more blocks would hardly change if `other` ties.

    A library call that is the fastest wins unless it loses by more than a tie. By pairs of blocks:
    what slowed both at one place says nothing of their difference.
    """
    pairs = zip(fastest.blocks, other.blocks, strict=True)
    effects = [math.log(statistics.median(b) / statistics.median(a)) for a, b in pairs]
    if len(effects) < 2:
        return False
    error = OF_MEDIAN * statistics.stdev(effects) / math.sqrt(len(effects))
    edge = TIE_SHARE if fastest.candidate.choice.kind != "library" else -TIE_SHARE
    return abs(math.log(other.p50() / fastest.p50()) - edge) > SURE * error


def _timing(runner: Runner, stayed: Sequence[Runner], place: float) -> Timing:
    count = len(runner.blocks)
    drift = statistics.median(r.p50() / r.p50(count) for r in stayed)
    ordered = sorted(time * drift for time in itertools.chain(*runner.blocks))
    p20, p50, p80 = (_percentile(ordered, share) for share in (0.2, 0.5, 0.8))
    return Timing(p20, p50, p80, len(ordered), noise_of(runner.blocks, place))


def _of_place(runner: Runner) -> float:
    return _of_blocks(runner.blocks) if len(runner.blocks) >= TOLD_BY else PLACE


def _of_blocks(blocks: Sequence[Sequence[float]]) -> float:
    """How far blocks are from each other, relatively."""
    medians = [*map(statistics.median, blocks)]
    return statistics.stdev(medians) / statistics.median(medians)


def _percentile(ordered: Sequence[float], share: float) -> float:
    """By linear interpolation, as numpy's."""
    at = share * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


def copy(tensor: Tensor) -> Tensor:
    """With its strides; what is one element to it is one element to the copy."""
    stride = tensor.stride()
    size = [n if step else min(n, 1) for n, step in zip(tensor.shape, stride, strict=True)]
    own = torch.empty_strided(size, stride, dtype=tensor.dtype, device=tensor.device)
    return own.copy_(tensor.as_strided(size, stride)).expand(tensor.shape)


def _same(before: Tensor, after: Tensor) -> bool:
    """To the bit, so that NaN is itself."""
    flat = (t.contiguous().reshape(-1).view(torch.uint8) for t in (before, after))
    return torch.equal(*flat)


def first_line(error: Exception) -> str:
    """Of a message that may go on for pages."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].strip() if lines else ''}"[:500]
