"""The shipped tables: the winner and the runner-up of each problem, as measured."""

from collections.abc import Iterable, Iterator

from msgspec.structs import replace

from ipex_inductor.autotune.pool import Estimate, Pool, pool
from ipex_inductor.autotune.record import Outcome, Record, encode


def file_name(arch: str) -> str:
    """Return the file name of the table of `arch`."""
    return f"winners-{arch.replace(':', '-')}.jsonl"


def winners(records: Iterable[Record], architectures: Iterable[str] = ()) -> Iterator[Record]:
    """Yield a record of each problem (of these architectures) with the best choice and the next.

    It is cut from the one record in which the winner's time is closest to its time over all
    records, so that timings and provenance belong to one measurement. A runner-up that was faster
    in that record is left out, so that selection still takes the winner. Problems without a winner
    are left out too.
    """
    wanted = set(architectures)
    selected = [r for r in records if not wanted or r.problem.arch in wanted]
    groups: dict[bytes, list[Record]] = {}
    for record in selected:
        groups.setdefault(encode(record.problem), []).append(record)
    for key, pooled in pool(selected).items():
        best = pooled.best()
        if best is not None:
            yield _cut_record(groups[key], best, _next(pooled, best))


def _next(pooled: Pool, best: Estimate) -> Estimate | None:
    """Return the fastest choice but the best; None without one."""
    runners_up = [e for e in pooled.estimates().values() if e.choice != best.choice]
    return min(runners_up, key=lambda e: (e.p50, encode(e.choice)), default=None)


def _cut_record(records: list[Record], best: Estimate, second: Estimate | None) -> Record:
    """Return the most typical record with the outcomes of the two choices only."""
    timed = (record for record in records if _outcome(record, best))
    record = min(timed, key=lambda r: (_distance(r, best), encode(r)))
    chosen = [_outcome(record, estimate) for estimate in (best, second) if estimate]
    cut = replace(record, outcomes=tuple(filter(None, chosen)))
    (pooled,) = pool([cut]).values()
    winner = pooled.best()
    if winner is None or winner.choice != best.choice:
        cut = replace(cut, outcomes=cut.outcomes[:1])
    return cut


def _distance(record: Record, best: Estimate) -> float:
    """Return how far the best choice's time in a record is from its time over all."""
    outcome = _outcome(record, best)
    return abs(outcome.timing.p50 - best.p50) if outcome and outcome.timing else 0.0


def _outcome(record: Record, of: Estimate) -> Outcome | None:
    """Return the timed outcome of the estimate's choice in a record; None without one."""
    same = (o for o in record.outcomes if o.timing and o.choice == of.choice)
    return next(same, None)
