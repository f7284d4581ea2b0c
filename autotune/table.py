"""The table that is shipped: of each problem the winner and the runner-up, as measured."""

from collections.abc import Iterable, Iterator

from msgspec.structs import replace

from ipex_inductor.autotune.pool import Estimate, Pool, pool
from ipex_inductor.autotune.record import Outcome, Record, encode


def file_name(arch: str) -> str:
    """Of the table for that architecture."""
    return f"winners-{arch.replace(':', '-')}.jsonl"


def winners(records: Iterable[Record], architectures: Iterable[str] = ()) -> Iterator[Record]:
    """A record of each problem (of these architectures) with the best choice and the next one.

    It is cut from one record, that in which the winner took most nearly what it takes over all, so
    that timings and provenance are of one measurement. What selection would choose by it is the
    winner: a runner-up that was faster there is left out. Problems without a winner are too.
    """
    wanted = set(architectures)
    kept = [r for r in records if not wanted or r.problem.arch in wanted]
    groups: dict[bytes, list[Record]] = {}
    for record in kept:
        groups.setdefault(encode(record.problem), []).append(record)
    for key, pooled in pool(kept).items():
        best = pooled.best()
        if best is not None:
            yield _cut(groups[key], best, _next(pooled, best))


def _next(pooled: Pool, best: Estimate) -> Estimate | None:
    others = [e for e in pooled.estimates().values() if e.choice != best.choice]
    return min(others, key=lambda e: (e.p50, encode(e.choice)), default=None)


def _cut(records: list[Record], best: Estimate, second: Estimate | None) -> Record:
    timed = (record for record in records if _outcome(record, best))
    record = min(timed, key=lambda r: (_distance(r, best), encode(r)))
    chosen = [_outcome(record, estimate) for estimate in (best, second) if estimate]
    cut = replace(record, outcomes=tuple(filter(None, chosen)))
    (again,) = pool([cut]).values()
    found = again.best()
    if found is None or found.choice != best.choice:
        cut = replace(cut, outcomes=cut.outcomes[:1])
    return cut


def _distance(record: Record, best: Estimate) -> float:
    outcome = _outcome(record, best)
    return abs(outcome.timing.p50 - best.p50) if outcome and outcome.timing else 0.0


def _outcome(record: Record, of: Estimate) -> Outcome | None:
    same = (o for o in record.outcomes if o.timing and o.choice == of.choice)
    return next(same, None)
