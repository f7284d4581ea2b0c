"""Comparison of two sets of records: changes, their size, and their significance over noise."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, StrEnum

from msgspec.structs import replace

from ipex_inductor.autotune.pool import Estimate, Pool, pool
from ipex_inductor.autotune.record import Problem, Record, decode_problem

# In standard errors of a difference: noise alone exceeds it in 0.3 % of the cases, and a difference
# of twice this band is detected in 99.9 %.
BAND = 3.0


class Verdict(StrEnum):
    """The change of one problem from A to B."""

    SAME = "same choice"
    NOISE = "within noise"
    FASTER = "faster"
    SLOWER = "slower"
    ONLY_A = "only in A"
    ONLY_B = "only in B"
    FAILED = "nothing runs in B"


class Exit(Enum):
    """Exit codes of a comparison."""

    NOTHING_WORSE = 0
    REGRESSIONS = 1
    NOT_COMPARABLE = 2


@dataclass(frozen=True, slots=True)
class Row:
    """One problem: the choices of both sides, their difference, and the noise of that.

    `effect` is log(time in B / time in A); `band` is the largest effect that noise may cause.
    """

    key: bytes  # the problem's canonical form
    verdict: Verdict
    a: Estimate | None = None
    b: Estimate | None = None
    effect: float = 0.0
    band: float = 0.0

    @property
    def problem(self) -> Problem:
        """The problem as a value; its architecture is "any" if architectures are compared."""
        return decode_problem(self.key)


@dataclass(frozen=True)
class Comparison:
    """All rows (failures first, then by size of effect), and their summary."""

    rows: tuple[Row, ...]
    reason: str = ""  # why they cannot be compared

    def count(self) -> Counter[Verdict]:
        """Return the number of problems of each verdict."""
        return Counter(row.verdict for row in self.rows)

    def geometric_mean(self) -> float | None:
        """Return the geometric mean of B's times relative to A's; None without common problems."""
        effects = [row.effect for row in self.rows if row.a and row.b]
        return math.exp(math.fsum(effects) / len(effects)) if effects else None

    def exit(self) -> Exit:
        """Return the exit code.

        Regressions are problems that are slower beyond noise, or that no choice runs for in B.
        """
        if self.reason:
            return Exit.NOT_COMPARABLE
        worse = {Verdict.SLOWER, Verdict.FAILED} & self.count().keys()
        return Exit.REGRESSIONS if worse else Exit.NOTHING_WORSE


def compare(a: Iterable[Record], b: Iterable[Record], cross: bool = False) -> Comparison:
    """Compare the records of B with those of A, problem by problem.

    With `cross`, architectures are compared: problems match if they differ only in architecture.
    """
    architectures: tuple[set[str], set[str]] = (set(), set())
    sides = [
        pool(_note_archs(side, archs, cross))
        for side, archs in zip((a, b), architectures, strict=True)
    ]
    names = [", ".join(sorted(archs)) for archs in architectures]
    if not cross and all(architectures) and not set.intersection(*architectures):
        return Comparison((), f"A is of {names[0]}, B of {names[1]}")
    if cross and any(len(archs) > 1 for archs in architectures):
        return Comparison((), f"one architecture each: A is of {names[0]}, B of {names[1]}")
    rows = (_row(key, sides[0].get(key), sides[1].get(key)) for key in sides[0] | sides[1])
    reason = "" if sides[0].keys() & sides[1].keys() else "A and B have no problem in common"
    return Comparison(tuple(sorted(rows, key=_rank)), reason)


def of_any(record: Record) -> Record:
    """Return the record with its problem's architecture set to "any", to compare architectures."""
    return replace(record, problem=replace(record.problem, arch="any"))


def _note_archs(records: Iterable[Record], archs: set[str], cross: bool) -> Iterator[Record]:
    """Yield the records and add their architectures to `architectures`.

    With `cross`, the records' own architecture is replaced by "any".
    """
    for record in records:
        archs.add(record.problem.arch)
        yield of_any(record) if cross else record


def _rank(row: Row) -> tuple[bool, float, bytes]:
    """Return the sort key of a row: failures first, then by size of effect."""
    return row.verdict is not Verdict.FAILED, -abs(row.effect), row.key


def _row(key: bytes, a: Pool | None, b: Pool | None) -> Row:
    """Return the row of a problem, given its pools in A and B."""
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
