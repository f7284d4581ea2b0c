"""Repeated tunings: do they choose the same, and what does it cost where they do not."""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ipex_inductor.autotune.pool import Estimate, Pool, pool
from ipex_inductor.autotune.record import Choice, Problem, Record, decode_problem, encode


@dataclass(frozen=True, slots=True)
class Row:
    """One problem: each database's winner, and by what share of time it is slower than the best.

    Best and slower by the records of all databases together. Endless is the regret of a winner that
    failed elsewhere; a database without a winner has None for both.
    """

    key: bytes  # the problem's canonical form
    best: Estimate | None
    winners: tuple[Choice | None, ...]
    regrets: tuple[float | None, ...]

    @property
    def problem(self) -> Problem:
        """As a value."""
        return decode_problem(self.key)

    @property
    def identical(self) -> float:
        """The share of the databases with a winner that have the most frequent one."""
        names = Counter(encode(winner) for winner in self.winners if winner)
        return max(names.values()) / names.total()

    @property
    def worst(self) -> float:
        """The largest regret."""
        return max(regret for regret in self.regrets if regret is not None)


@dataclass(frozen=True)
class Regret:
    """All problems with a winner in two databases or more, the most regretted first."""

    rows: tuple[Row, ...]
    alone: int  # problems with fewer winners

    def identical(self) -> float:
        """The share of the problems on which all databases agree."""
        return sum(row.identical == 1.0 for row in self.rows) / len(self.rows)

    def agreements(self) -> tuple[float, ...]:
        """For any two databases, the share of the problems with a winner in both that is the same.

        What is said elsewhere of two tunings compares with these.
        """
        columns = zip(*(row.winners for row in self.rows), strict=True)
        pairs = itertools.combinations(columns, 2)
        return tuple(share for share in itertools.starmap(_agreement, pairs) if share is not None)

    def worst(self) -> float:
        """The largest regret of any winner."""
        return max(row.worst for row in self.rows)

    def mean(self) -> float:
        """Over all winners of all databases."""
        regrets = [r for row in self.rows for r in row.regrets if r is not None]
        return math.fsum(regrets) / len(regrets)


def regret(databases: Sequence[Iterable[Record]]) -> Regret:
    """Lay repeated tunings side by side; problems that only one of them tuned are but counted."""
    pools = [pool(database) for database in databases]
    keys = sorted(set().union(*pools))
    rows = [_row(key, [each.get(key) for each in pools]) for key in keys]
    shared = [row for row in rows if sum(winner is not None for winner in row.winners) > 1]
    shared.sort(key=lambda row: (-row.worst, row.key))
    return Regret(tuple(shared), len(rows) - len(shared))


def _agreement(one: Sequence[Choice | None], other: Sequence[Choice | None]) -> float | None:
    both = [a == b for a, b in zip(one, other, strict=True) if a and b]
    return sum(both) / len(both) if both else None


def _row(key: bytes, pools: Sequence[Pool | None]) -> Row:
    together = Pool()
    for each in filter(None, pools):
        together.join(each)
    best, estimates = together.best(), together.estimates()
    winners = [winner.choice if winner else None for winner in (p and p.best() for p in pools)]
    regrets = (_regret(best, estimates.get(encode(w))) if w else None for w in winners)
    return Row(key, best, tuple(winners), tuple(regrets))


def _regret(best: Estimate | None, winner: Estimate | None) -> float:
    """A winner that is faster than the best, which has won by a tie, costs nothing."""
    if best is None or winner is None:
        return math.inf
    return max(0.0, math.expm1(best.effect(winner)))
