"""All measurements of a problem together, in whatever order, and which choice they make."""

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field

from ipex_inductor.autotune.record import Choice, Outcome, Problem, Record, encode

# What is slower by less than that many standard errors of the difference, and by no more than that
# share at all, is as good as the best: repeated tunings then choose the same.
TIE_ERRORS, TIE_SHARE = 3.0, 0.02

# Measurements that spread by more than so many times their noise are not believed about it: chance
# does that to one in 8,000 sets of three.
DOUBTFUL = 3.0
OF_MEDIAN = math.sqrt(math.pi / 2)  # the standard error of a median, in those of a mean


@dataclass(frozen=True)
class Estimate:
    """How long a choice takes, in microseconds, and the relative standard error of that."""

    choice: Choice
    p50: float
    noise: float

    def effect(self, other: "Estimate") -> float:
        """The logarithm of how many times as long `other` takes."""
        return math.log(other.p50 / self.p50)

    def noise_against(self, other: "Estimate") -> float:
        """The standard error of that."""
        return math.hypot(self.noise, other.noise)


@dataclass
class Pool:
    """What all records say of one problem: the outcomes of each choice."""

    problem: Problem
    outcomes: dict[bytes, list[Outcome]] = field(default_factory=dict)

    def estimates(self) -> list[Estimate]:
        """One for each choice that never failed, the fastest first."""
        found = [
            _estimate(outcomes)
            for outcomes in self.outcomes.values()
            if all(outcome.timing is not None for outcome in outcomes)
        ]
        return sorted(found, key=lambda e: (e.p50, encode(e.choice)))

    def best(self) -> Estimate | None:
        """The choice to use: what ties with the fastest, library calls first, then by name."""
        estimates = self.estimates()
        if not estimates:
            return None
        fastest = estimates[0]
        return min((e for e in estimates if _ties(fastest, e)), key=_preference)


def pool(records: Iterable[Record]) -> dict[bytes, Pool]:
    """The records of each problem, by its canonical form."""
    pools: dict[bytes, Pool] = {}
    for record in records:
        of = pools.setdefault(encode(record.problem), Pool(record.problem))
        for outcome in record.outcomes:
            of.outcomes.setdefault(encode(outcome.choice), []).append(outcome)
    return pools


def _estimate(outcomes: list[Outcome]) -> Estimate:
    """The median of the medians; its noise as said, or as they differ if they do more."""
    timings = [outcome.timing for outcome in outcomes if outcome.timing is not None]
    choice, count = outcomes[0].choice, len(timings)
    p50 = statistics.median([timing.p50 for timing in timings])
    noise = math.sqrt(math.fsum([timing.noise**2 for timing in timings]) / count)
    if count > 2:
        seen = _spread([math.log(timing.p50) for timing in timings])
        noise = OF_MEDIAN * (seen if seen > DOUBTFUL * noise else noise)
    return Estimate(choice, p50, noise / math.sqrt(count))


def _spread(values: list[float]) -> float:
    """The standard deviation; that of `statistics` is exact, and takes a hundred times as long."""
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum([(v - mean) ** 2 for v in values]) / (len(values) - 1))


def _ties(fastest: Estimate, other: Estimate) -> bool:
    return fastest.effect(other) <= min(TIE_SHARE, TIE_ERRORS * fastest.noise_against(other))


def _preference(estimate: Estimate) -> tuple[bool, bytes]:
    return estimate.choice.kind != "library", encode(estimate.choice)
