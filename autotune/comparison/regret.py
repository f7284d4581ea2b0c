"""Consistency of repeated tunings: how often they agree, and the cost if they do not."""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ipex_inductor.autotune.pool import Estimate, Pool, pool
from ipex_inductor.autotune.record import Choice, Problem, Record, decode_problem, encode


@dataclass(frozen=True, slots=True)
class Row:
    """One problem: each database's winner, and how much slower than the best it is, as a share.

    Times are those of all databases together. The regret of a winner that failed in another
    database is infinite; a database without a winner has None for both.
    """

    key: bytes  # the problem's canonical form
    best: Estimate | None
    winners: tuple[Choice | None, ...]
    regrets: tuple[float | None, ...]

    @property
    def problem(self) -> Problem:
        """The problem as a value."""
        return decode_problem(self.key)

    @property
    def identical(self) -> float:
        """The share of winners that equal the most frequent one."""
        names = Counter(encode(winner) for winner in self.winners if winner)
        return max(names.values()) / names.total()

    @property
    def worst(self) -> float:
        """The largest regret."""
        return max(regret for regret in self.regrets if regret is not None)


@dataclass(frozen=True)
class Regret:
    """All problems with a winner in two databases or more, by regret in descending order."""

    rows: tuple[Row, ...]
    alone: int  # problems with fewer winners

    def identical(self) -> float:
        """Return the share of problems on which all databases agree."""
        return sum(row.identical == 1.0 for row in self.rows) / len(self.rows)

    def agreements(self) -> tuple[float, ...]:
        """Return for each pair of databases the share of common problems with equal winners.

        These numbers compare with published ones for two tunings.
        """
        columns = zip(*(row.winners for row in self.rows), strict=True)
        pairs = itertools.combinations(columns, 2)
        return tuple(share for share in itertools.starmap(_agreement, pairs) if share is not None)

    def worst(self) -> float:
        """Return the largest regret of any winner."""
        return max(row.worst for row in self.rows)

    def mean(self) -> float:
        """Return the mean regret over all winners of all databases."""
        regrets = [r for row in self.rows for r in row.regrets if r is not None]
        return math.fsum(regrets) / len(regrets)


def regret(databases: Sequence[Iterable[Record]]) -> Regret:
    """Compare repeated tunings; problems with fewer than two winners are only counted."""
    pools = [pool(database) for database in databases]
    keys = sorted(set().union(*pools))
    rows = [_row(key, [database_pools.get(key) for database_pools in pools]) for key in keys]
    shared = [row for row in rows if sum(winner is not None for winner in row.winners) > 1]
    shared.sort(key=lambda row: (-row.worst, row.key))
    return Regret(tuple(shared), len(rows) - len(shared))


def _agreement(one: Sequence[Choice | None], another: Sequence[Choice | None]) -> float | None:
    """Return the share of equal winners among problems with both; None without any."""
    both = [a == b for a, b in zip(one, another, strict=True) if a and b]
    return sum(both) / len(both) if both else None


def _row(key: bytes, pools: Sequence[Pool | None]) -> Row:
    """Return the row of a problem from its pool in each database."""
    union = Pool()
    for database_pool in filter(None, pools):
        union.join(database_pool)
    best, estimates = union.best(), union.estimates()
    winners = [winner.choice if winner else None for winner in (p and p.best() for p in pools)]
    regrets = (_regret(best, estimates.get(encode(w))) if w else None for w in winners)
    return Row(key, best, tuple(winners), tuple(regrets))


def _regret(best: Estimate | None, winner: Estimate | None) -> float:
    """Return how much slower the winner is than the best, as a share, but at least 0.

    A winner that is faster than the best, which then won by a tie, costs nothing.
    """
    if best is None or winner is None:
        return math.inf
    return max(0.0, math.expm1(best.effect(winner)))
