"""All measurements of a problem together, in whatever order, and which choice they make."""

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ipex_inductor.autotune.record import Choice, Outcome, Record, Timing, encode

# What is slower by no more than that share (of a logarithm) is as good as the fastest, so that
# repeated tunings choose the same: the 2 % that a choice may cost, less the noise that a long race
# leaves of small kernels (0.6 %), by which what is taken for a tie may be slower. It does not
# depend on the noise found, which is itself known too badly to draw the same line twice.
TIE_SHARE = 0.015
_TIED = math.exp(TIE_SHARE)

# Measurements that spread by more than so many times their noise are not believed about it: chance
# does that to one in 8,000 sets of three.
DOUBTFUL = 3.0
OF_MEDIAN = math.sqrt(math.pi / 2)  # the standard error of a median, in those of a mean


@dataclass(frozen=True, slots=True)
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


@dataclass(slots=True)
class Samples:
    """What the measurements of one choice found; a failure among them is final."""

    choice: Choice
    timings: list[Timing] = field(default_factory=list)
    failed: bool = False
    reported: tuple[float, ...] = ()  # by other tools

    def add(self, outcome: Outcome) -> None:
        """One more measurement."""
        if outcome.timing is not None:
            self.timings.append(outcome.timing)
        elif outcome.reported is not None:
            self.reported += (outcome.reported,)
        elif outcome.predicted is None:
            self.failed = True

    def join(self, other: "Samples") -> None:
        """All measurements of the same choice by another."""
        self.timings += other.timings
        self.reported += other.reported
        self.failed |= other.failed

    def estimate(self) -> Estimate:
        """The median of the medians; its noise as said, or as they differ if they do more."""
        count = len(self.timings)
        if count == 1:
            return Estimate(self.choice, self.timings[0].p50, self.timings[0].noise)
        noise = math.sqrt(math.fsum([t.noise**2 for t in self.timings]) / count)
        if count > 2:
            seen = _spread([math.log(t.p50) for t in self.timings])
            noise = OF_MEDIAN * (seen if seen > DOUBTFUL * noise else noise)
        return Estimate(self.choice, self.middle(), noise / math.sqrt(count))

    def middle(self) -> float:
        """The median of the medians."""
        if len(self.timings) == 1:
            return self.timings[0].p50
        return statistics.median([t.p50 for t in self.timings])


@dataclass(slots=True)
class Pool:
    """What all records say of one problem: the samples of each choice, by its canonical form."""

    samples: dict[bytes, Samples] = field(default_factory=dict)

    def add(self, outcomes: Iterable[Outcome], choices: dict[bytes, tuple[bytes, Choice]]) -> None:
        """One more measurement; `choices` are those met so far, which problems share."""
        for outcome in outcomes:
            key = encode(outcome.choice)
            key, choice = choices.setdefault(key, (key, outcome.choice))
            if key not in self.samples:
                self.samples[key] = Samples(choice)
            self.samples[key].add(outcome)

    def join(self, other: "Pool") -> None:
        """All that another pool of the same problem holds."""
        for key, more in other.samples.items():
            self.samples.setdefault(key, Samples(more.choice)).join(more)

    def estimates(self) -> dict[bytes, Estimate]:
        """One for each choice that we measured and that never failed."""
        return {key: s.estimate() for key, s in self.samples.items() if s.timings and not s.failed}

    def failed(self) -> set[bytes]:
        """The choices that failed once, which is final."""
        return {key for key, s in self.samples.items() if s.failed}

    def reported(self) -> dict[bytes, Estimate]:
        """What other tools say of choices that never failed here; nobody knows with what noise."""
        return {
            key: Estimate(s.choice, statistics.median(s.reported), math.inf)
            for key, s in self.samples.items()
            if s.reported and not s.failed
        }

    def best(self) -> Estimate | None:
        """The choice to use: what ties with the fastest, library calls first, then by name."""
        times = {key: s.middle() for key, s in self.samples.items() if s.timings and not s.failed}
        key = _best({key: (self.samples[key].choice, time) for key, time in times.items()})
        return self.samples[key].estimate() if key else None

    def best_known(self) -> Estimate | None:
        """The same where we measured, else by other tools' word: to look at, not to use."""
        best = self.best()
        if best is not None:
            return best
        reported = self.reported()
        key = _best({key: (e.choice, e.p50) for key, e in reported.items()})
        return reported[key] if key else None


def pool(records: Iterable[Record]) -> dict[bytes, Pool]:
    """The records of each problem, by its canonical form."""
    pools: dict[bytes, Pool] = {}
    choices: dict[bytes, tuple[bytes, Choice]] = {}  # there are few
    for record in records:
        pools.setdefault(encode(record.problem), Pool()).add(record.outcomes, choices)
    return pools


def _best(times: Mapping[bytes, tuple[Choice, float]]) -> bytes | None:
    """The key of the choice to use, by what each takes."""
    limit = min((time for _, time in times.values()), default=0.0) * _TIED
    ties = (key for key, (_, time) in times.items() if time <= limit)
    return min(ties, key=lambda key: (times[key][0].kind != "library", key), default=None)


def _spread(values: list[float]) -> float:
    """The standard deviation; that of `statistics` is exact, and takes a hundred times as long."""
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum([(v - mean) ** 2 for v in values]) / (len(values) - 1))
