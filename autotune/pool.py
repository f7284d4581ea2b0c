"""All measurements of a problem together, in whatever order, and which choice they make."""

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field

from ipex_inductor.autotune.record import Choice, Outcome, Record, encode

# What is slower by less than that many standard errors of the difference, and by no more than that
# share at all, is as good as the best: repeated tunings then choose the same.
TIE_ERRORS, TIE_SHARE = 3.0, 0.02

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
    p50: list[float] = field(default_factory=list)
    noise: list[float] = field(default_factory=list)
    failed: bool = False
    reported: list[float] | None = None  # by other tools

    def add(self, outcome: Outcome) -> None:
        """One more measurement."""
        if outcome.timing is not None:
            self.p50.append(outcome.timing.p50)
            self.noise.append(outcome.timing.noise)
        elif outcome.reported is not None:
            self.reported = [*(self.reported or ()), outcome.reported]
        else:
            self.failed = True

    def join(self, other: "Samples") -> None:
        """All measurements of the same choice by another."""
        self.p50 += other.p50
        self.noise += other.noise
        self.failed |= other.failed
        self.reported = [*(self.reported or ()), *(other.reported or ())]

    def estimate(self) -> Estimate:
        """The median of the medians; its noise as said, or as they differ if they do more."""
        count = len(self.p50)
        if count == 1:
            return Estimate(self.choice, self.p50[0], self.noise[0])
        noise = math.sqrt(math.fsum([n**2 for n in self.noise]) / count)
        if count > 2:
            seen = _spread([math.log(p50) for p50 in self.p50])
            noise = OF_MEDIAN * (seen if seen > DOUBTFUL * noise else noise)
        return Estimate(self.choice, statistics.median(self.p50), noise / math.sqrt(count))


@dataclass(slots=True)
class Pool:
    """What all records say of one problem: the samples of each choice, by its canonical form."""

    samples: dict[bytes, Samples] = field(default_factory=dict)

    def add(self, key: bytes, choice: Choice, outcome: Outcome) -> None:
        """One more outcome of this choice, whose canonical form is `key`."""
        if key not in self.samples:
            self.samples[key] = Samples(choice)
        self.samples[key].add(outcome)

    def join(self, other: "Pool") -> None:
        """All that another pool of the same problem holds."""
        for key, more in other.samples.items():
            self.samples.setdefault(key, Samples(more.choice)).join(more)

    def estimates(self) -> dict[bytes, Estimate]:
        """One for each choice that we measured and that never failed."""
        return {key: s.estimate() for key, s in self.samples.items() if s.p50 and not s.failed}

    def reported(self) -> dict[bytes, Estimate]:
        """What other tools say of choices that never failed here; nobody knows with what noise."""
        return {
            key: Estimate(s.choice, statistics.median(s.reported), math.inf)
            for key, s in self.samples.items()
            if s.reported and not s.failed
        }

    def best(self) -> Estimate | None:
        """The choice to use: what ties with the fastest, library calls first, then by name."""
        return _best(self.estimates())

    def best_known(self) -> Estimate | None:
        """The same where we measured, else by other tools' word: to look at, not to use."""
        return self.best() or _best(self.reported())


def pool(records: Iterable[Record]) -> dict[bytes, Pool]:
    """The records of each problem, by its canonical form."""
    pools: dict[bytes, Pool] = {}
    choices: dict[bytes, tuple[bytes, Choice]] = {}  # there are few; problems share them
    for record in records:
        pooled = pools.setdefault(encode(record.problem), Pool())
        for outcome in record.outcomes:
            key = encode(outcome.choice)
            pooled.add(*choices.setdefault(key, (key, outcome.choice)), outcome)
    return pools


def _best(estimates: dict[bytes, Estimate]) -> Estimate | None:
    if not estimates:
        return None
    fastest = min(estimates.values(), key=lambda e: e.p50)
    ties = {key: e for key, e in estimates.items() if _ties(fastest, e)}
    return ties[min(ties, key=lambda key: (ties[key].choice.kind != "library", key))]


def _spread(values: list[float]) -> float:
    """The standard deviation; that of `statistics` is exact, and takes a hundred times as long."""
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum([(v - mean) ** 2 for v in values]) / (len(values) - 1))


def _ties(fastest: Estimate, other: Estimate) -> bool:
    effect = fastest.effect(other)
    return effect <= TIE_SHARE and effect <= TIE_ERRORS * fastest.noise_against(other)
