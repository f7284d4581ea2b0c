"""Two sets of records side by side: what changed, by how much, and if that is more than noise."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, StrEnum

import msgspec

from ipex_inductor.autotune.pool import Estimate, Pool, pool
from ipex_inductor.autotune.record import Problem, Record, encode

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


@dataclass(frozen=True)
class Row:
    """One problem: the choices of both sides; `effect` is log(B / A), `band` what noise may do."""

    problem: Problem
    verdict: Verdict
    a: Estimate | None = None
    b: Estimate | None = None
    effect: float = 0.0
    band: float = 0.0


@dataclass(frozen=True)
class Comparison:
    """All rows, the largest effects first, and what they come to."""

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
    pools = pool(a), pool(b)
    architectures = [{p.problem.arch for p in side.values()} for side in pools]
    names = [", ".join(sorted(side)) for side in architectures]
    if not cross and all(architectures) and not set.intersection(*architectures):
        return Comparison((), f"A is of {names[0]}, B of {names[1]}")
    if cross and any(len(side) > 1 for side in architectures):
        return Comparison((), f"one architecture each: A is of {names[0]}, B of {names[1]}")
    sides = [_by_problem(side.values(), cross) for side in pools]
    rows = (_row(sides[0].get(key), sides[1].get(key)) for key in sides[0] | sides[1])
    return Comparison(tuple(sorted(rows, key=lambda r: (-abs(r.effect), encode(r.problem)))))


def _by_problem(pools: Iterable[Pool], cross: bool) -> dict[bytes, Pool]:
    def key(problem: Problem) -> bytes:
        return encode(msgspec.structs.replace(problem, arch="any") if cross else problem)

    return {key(found.problem): found for found in pools}


def _row(a: Pool | None, b: Pool | None) -> Row:
    problem = (a or b).problem  # type: ignore[union-attr]
    best = [side.best() if side else None for side in (a, b)]
    before, after = best
    if before is None and after is None:
        return Row(problem, Verdict.SAME if a and b else Verdict.ONLY_A if a else Verdict.ONLY_B)
    if after is None:
        return Row(problem, Verdict.FAILED if b else Verdict.ONLY_A, before)
    if before is None:
        return Row(problem, Verdict.FASTER if a else Verdict.ONLY_B, None, after)
    effect, band = before.effect(after), BAND * before.noise_against(after)
    if abs(effect) > band:
        verdict = Verdict.SLOWER if effect > 0 else Verdict.FASTER
    else:
        verdict = Verdict.SAME if before.choice == after.choice else Verdict.NOISE
    return Row(problem, verdict, before, after, effect, band)
