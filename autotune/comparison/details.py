"""All measurements of each problem, one line a choice, for reports."""

import statistics
from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Any

from ipex_inductor.autotune.pool import Pool
from ipex_inductor.autotune.record import (
    Choice,
    Outcome,
    Problem,
    Provenance,
    Record,
    decode_problem,
    encode,
)


@dataclass(frozen=True, slots=True)
class Line:
    """One choice over all records: medians of the percentiles, in microseconds; the worst error.

    `noise` is that of the pooled p50. `reported` is the unverified time of other tools, `predicted`
    that of the cost model. Registers are per thread, shared memory is in bytes per block.
    """

    choice: Choice
    best: bool
    measured: int
    p20: float | None = None
    p50: float | None = None
    p80: float | None = None
    noise: float | None = None
    error: float | None = None
    tolerance: float | None = None
    bandwidth: float | None = None
    rate: float | None = None
    reported: float | None = None
    predicted: float | None = None
    registers: float | None = None
    spills: float | None = None
    shared_memory: float | None = None
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Details:
    """One problem: the best choice first, then the others by time, then the failures."""

    key: bytes  # the problem's canonical form
    lines: tuple[Line, ...]
    provenance: tuple[Provenance, ...]

    @property
    def problem(self) -> Problem:
        """The problem as a value."""
        return decode_problem(self.key)


def details(
    records: Iterable[Record], wanted: Container[bytes] | None = None
) -> dict[bytes, Details]:
    """Return the details of each problem by canonical form, in that order.

    With `wanted`, only of these problems.
    """
    groups: dict[bytes, list[Record]] = {}
    for record in records:
        key = encode(record.problem)
        if wanted is None or key in wanted:
            groups.setdefault(key, []).append(record)
    return {key: _details(key, groups[key]) for key in sorted(groups)}


def _details(key: bytes, records: list[Record]) -> Details:
    """Return the details of one problem from all its records."""
    outcomes: dict[bytes, list[Outcome]] = {}
    pooled = Pool()
    for record in records:
        pooled.add(record.outcomes, {})
        for outcome in record.outcomes:
            outcomes.setdefault(encode(outcome.choice), []).append(outcome)
    best, estimates = pooled.best(), pooled.estimates()
    lines = []
    for name, choice_outcomes in outcomes.items():
        estimate = estimates.get(name)
        chosen = best is not None and estimate is not None and best.choice == estimate.choice
        lines.append(_line(choice_outcomes, chosen, estimate.noise if estimate else None))
    provenance = {encode(record.provenance): record.provenance for record in records}
    dated = sorted(provenance.items(), key=lambda item: (item[1].date, item[0]))
    return Details(key, tuple(sorted(lines, key=_rank)), tuple(source for _, source in dated))


def _line(outcomes: list[Outcome], best: bool, noise: float | None) -> Line:
    """Return the line of one choice from all its outcomes."""
    timings = [o.timing for o in outcomes if o.timing]
    worst = max(outcomes, key=_share_of_tolerance)
    return Line(
        outcomes[0].choice,
        best,
        len(timings),
        p20=_median(t.p20 for t in timings),
        p50=_median(t.p50 for t in timings),
        p80=_median(t.p80 for t in timings),
        noise=noise,
        error=worst.error,
        tolerance=worst.tolerance,
        bandwidth=_median(o.bandwidth for o in outcomes),
        rate=_median(o.rate for o in outcomes),
        reported=_median(o.reported for o in outcomes),
        predicted=_median(o.predicted for o in outcomes),
        registers=_median(o.registers for o in outcomes),
        spills=_median(o.spills for o in outcomes),
        shared_memory=_median(o.shared_memory for o in outcomes),
        reasons=tuple(sorted({o.reason for o in outcomes if o.reason})),
    )


def _median(values: Iterable[Any]) -> float | None:
    """Return the median of the values that are not None; None without any."""
    present = [value for value in values if value is not None]
    return statistics.median(present) if present else None


def _share_of_tolerance(outcome: Outcome) -> float:
    """Return the error relative to its tolerance; -1 for an unverified outcome."""
    if outcome.error is None or outcome.tolerance is None:
        return -1.0
    return outcome.error / outcome.tolerance if outcome.tolerance else outcome.error


def _rank(line: Line) -> tuple[bool, bool, float, bytes]:
    """Return the sort key of a line: the best first, failures last, then by time."""
    time = line.p50 or line.reported or line.predicted
    return not line.best, bool(line.reasons) or time is None, time or 0.0, encode(line.choice)
