"""All measurements of a problem pooled, in any order, and the choice they lead to."""

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ipex_inductor.autotune.record import Choice, Outcome, Record, Timing, encode

# A choice slower by no more than this share (of a logarithm) ties with the fastest, so that
# repeated tunings choose alike. It is the 2 % that a choice may cost, less the noise that a long
# race leaves for small kernels (0.6 %), by which a tie may be slower. It does not depend on the
# measured noise, which is too uncertain to give the same limit twice.
TIE_SHARE = 0.015
_TIED = math.exp(TIE_SHARE)

# If measurements spread by more than this multiple of their noise, the spread is used instead: by
# chance that happens to one in 8,000 sets of three.
DOUBTFUL = 3.0
OF_MEDIAN = math.sqrt(math.pi / 2)  # ratio of the standard errors of a median and a mean


@dataclass(frozen=True, slots=True)
class Estimate:
    """The time of a choice in microseconds, and its relative standard error."""

    choice: Choice
    p50: float
    noise: float

    def effect(self, rival: "Estimate") -> float:
        """Return the logarithm of the ratio of `rival`'s time to this one's."""
        return math.log(rival.p50 / self.p50)

    def noise_against(self, rival: "Estimate") -> float:
        """Return the standard error of `effect`."""
        return math.hypot(self.noise, rival.noise)


@dataclass(slots=True)
class Samples:
    """The measurements of one choice; one failure among them is final."""

    choice: Choice
    timings: list[Timing] = field(default_factory=list)
    failed: bool = False
    reported: tuple[float, ...] = ()  # microseconds, by other tools

    def add(self, outcome: Outcome) -> None:
        """Add one measurement."""
        if outcome.timing is not None:
            self.timings.append(outcome.timing)
        elif outcome.reported is not None:
            self.reported += (outcome.reported,)
        elif outcome.predicted is None:
            self.failed = True

    def join(self, more: "Samples") -> None:
        """Add all measurements of this choice from another pool."""
        self.timings += more.timings
        self.reported += more.reported
        self.failed |= more.failed

    def estimate(self) -> Estimate:
        """Return the median of the medians with its noise.

        The noise is that of the measurements, or that of their spread if it is much larger.
        """
        count = len(self.timings)
        if count == 1:
            return Estimate(self.choice, self.timings[0].p50, self.timings[0].noise)
        noise = math.sqrt(math.fsum([t.noise**2 for t in self.timings]) / count)
        if count > 2:
            spread = _spread([math.log(t.p50) for t in self.timings])
            noise = OF_MEDIAN * (spread if spread > DOUBTFUL * noise else noise)
        return Estimate(self.choice, self.middle(), noise / math.sqrt(count))

    def middle(self) -> float:
        """Return the median of the medians."""
        if len(self.timings) == 1:
            return self.timings[0].p50
        return statistics.median([t.p50 for t in self.timings])


@dataclass(slots=True)
class Pool:
    """All records of one problem: the samples of each choice, by its canonical form."""

    samples: dict[bytes, Samples] = field(default_factory=dict)

    def add(self, outcomes: Iterable[Outcome], choices: dict[bytes, tuple[bytes, Choice]]) -> None:
        """Add one measurement; `choices` interns the choices, which problems share."""
        for outcome in outcomes:
            key = encode(outcome.choice)
            key, choice = choices.setdefault(key, (key, outcome.choice))
            if key not in self.samples:
                self.samples[key] = Samples(choice)
            self.samples[key].add(outcome)

    def join(self, more: "Pool") -> None:
        """Add all samples of another pool of this problem."""
        for key, samples in more.samples.items():
            self.samples.setdefault(key, Samples(samples.choice)).join(samples)

    def estimates(self) -> dict[bytes, Estimate]:
        """Return the estimate of each choice that was measured and never failed."""
        return {key: s.estimate() for key, s in self.samples.items() if s.timings and not s.failed}

    def failed_choices(self) -> set[bytes]:
        """Return the choices that failed at least once, which is final."""
        return {key for key, s in self.samples.items() if s.failed}

    def reported_estimates(self) -> dict[bytes, Estimate]:
        """Return other tools' times of choices that never failed here; their noise is infinite."""
        return {
            key: Estimate(s.choice, statistics.median(s.reported), math.inf)
            for key, s in self.samples.items()
            if s.reported and not s.failed
        }

    def best(self) -> Estimate | None:
        """Return the choice to use.

        Of the choices that tie with the fastest, a library call comes first, then the order of
        canonical forms decides.
        """
        times = {key: s.middle() for key, s in self.samples.items() if s.timings and not s.failed}
        key = _best({key: (self.samples[key].choice, time) for key, time in times.items()})
        return self.samples[key].estimate() if key else None

    def best_known(self) -> Estimate | None:
        """Return `best`, or the best by other tools' times if nothing was measured; for display."""
        best = self.best()
        if best is not None:
            return best
        reported = self.reported_estimates()
        key = _best({key: (e.choice, e.p50) for key, e in reported.items()})
        return reported[key] if key else None


def pool(records: Iterable[Record]) -> dict[bytes, Pool]:
    """Return the pool of each problem's records, by its canonical form."""
    pools: dict[bytes, Pool] = {}
    choices: dict[bytes, tuple[bytes, Choice]] = {}  # there are few
    for record in records:
        pools.setdefault(encode(record.problem), Pool()).add(record.outcomes, choices)
    return pools


def _best(times: Mapping[bytes, tuple[Choice, float]]) -> bytes | None:
    """Return the key of the choice to use, given the choices and their times."""
    limit = min((time for _, time in times.values()), default=0.0) * _TIED
    ties = (key for key, (_, time) in times.items() if time <= limit)
    return min(ties, key=lambda key: (times[key][0].kind != "library", key), default=None)


def _spread(values: list[float]) -> float:
    """Return the standard deviation, a hundred times as fast as `statistics`, which is exact."""
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum([(v - mean) ** 2 for v in values]) / (len(values) - 1))
