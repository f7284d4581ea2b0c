"""Two sets of records side by side: what changed, by how much, and if that is more than noise."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, StrEnum

from msgspec.structs import replace

from ipex_inductor.autotune.pool import Estimate, Pool, pool
from ipex_inductor.autotune.record import Problem, Record, decode_problem

# Standard errors of a difference that noise alone exceeds in 0.3 % of the cases; a difference of
# twice that band is found in 99.9 %.
BAND = 3.0


class Verdict(StrEnum):
    """What became of one problem from A to B."""

    SAME = "same choice"
    NOISE = "within noise"
    FASTER = "faster"
    SLOWER = "slower"
    ONLY_A = "only in A"
    ONLY_B = "only in B"
    FAILED = "nothing runs in B"


class Exit(Enum):
    """How a comparison ends, as an exit code."""

    NOTHING_WORSE = 0
    REGRESSIONS = 1
    NOT_COMPARABLE = 2


@dataclass(frozen=True, slots=True)
class Row:
    """One problem: the choices of both sides; `effect` is log(B / A), `band` what noise may do."""

    key: bytes  # the problem's canonical form
    verdict: Verdict
    a: Estimate | None = None
    b: Estimate | None = None
    effect: float = 0.0
    band: float = 0.0

    @property
    def problem(self) -> Problem:
        """As a value; that of any architecture where architectures are compared."""
        return decode_problem(self.key)


@dataclass(frozen=True)
class Comparison:
    """All rows, what fails first, then the largest effects; and what they come to."""

    rows: tuple[Row, ...]
    reason: str = ""  # why they cannot be compared

    def count(self) -> Counter[Verdict]:
        """How many problems there are of each verdict."""
        return Counter(row.verdict for row in self.rows)

    def geometric_mean(self) -> float | None:
        """How many times as long B takes, over what both have; None if they share nothing."""
        effects = [row.effect for row in self.rows if row.a and row.b]
        return math.exp(math.fsum(effects) / len(effects)) if effects else None

    def exit(self) -> Exit:
        """Regressions are what is slower beyond noise, and what nothing runs for any more."""
        if self.reason:
            return Exit.NOT_COMPARABLE
        worse = {Verdict.SLOWER, Verdict.FAILED} & self.count().keys()
        return Exit.REGRESSIONS if worse else Exit.NOTHING_WORSE


def compare(a: Iterable[Record], b: Iterable[Record], cross: bool = False) -> Comparison:
    """Lay B beside A. `cross` compares architectures: problems are then the same but for those."""
    architectures: tuple[set[str], set[str]] = (set(), set())
    sides = [
        pool(_noted(side, seen, cross)) for side, seen in zip((a, b), architectures, strict=True)
    ]
    names = [", ".join(sorted(seen)) for seen in architectures]
    if not cross and all(architectures) and not set.intersection(*architectures):
        return Comparison((), f"A is of {names[0]}, B of {names[1]}")
    if cross and any(len(seen) > 1 for seen in architectures):
        return Comparison((), f"one architecture each: A is of {names[0]}, B of {names[1]}")
    rows = (_row(key, sides[0].get(key), sides[1].get(key)) for key in sides[0] | sides[1])
    reason = "" if sides[0].keys() & sides[1].keys() else "A and B have no problem in common"
    return Comparison(tuple(sorted(rows, key=_rank)), reason)


def of_any(record: Record) -> Record:
    """The same with a problem of any architecture, as where architectures are compared."""
    return replace(record, problem=replace(record.problem, arch="any"))


def _noted(records: Iterable[Record], seen: set[str], cross: bool) -> Iterator[Record]:
    """The same, their architectures noted, and made one if all are compared."""
    for record in records:
        seen.add(record.problem.arch)
        yield of_any(record) if cross else record


def _rank(row: Row) -> tuple[bool, float, bytes]:
    return row.verdict is not Verdict.FAILED, -abs(row.effect), row.key


def _row(key: bytes, a: Pool | None, b: Pool | None) -> Row:
    before, after = (side.best_known() if side else None for side in (a, b))
    if before is None and after is None:
        return Row(key, Verdict.SAME if a and b else Verdict.ONLY_A if a else Verdict.ONLY_B)
    if after is None:
        return Row(key, Verdict.FAILED if b else Verdict.ONLY_A, before)
    if before is None:
        return Row(key, Verdict.FASTER if a else Verdict.ONLY_B, None, after)
    effect, band = before.effect(after), BAND * before.noise_against(after)
    if abs(effect) > band:
        verdict = Verdict.SLOWER if effect > 0 else Verdict.FASTER
    else:
        verdict = Verdict.SAME if before.choice == after.choice else Verdict.NOISE
    return Row(key, verdict, before, after, effect, band)
