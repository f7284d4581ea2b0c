"""Selection: the best known choice of each problem, and the source of that knowledge.

The user's own records come first, then the tables shipped with the package. A problem in neither is
measured if that is allowed. Otherwise the sources are, in order: another torch's records; the best
choice of a convolution at the nearest batch, or of a linear layer at the nearest number of rows;
the table of a similar GPU; the agreement of the nearest neighbors; and a model, for classes of
problems where its held-out predictions were right. Without any of these, the library is used.
"""

import dataclasses
import hashlib
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from msgspec.structs import replace

from ipex_inductor.aot_cache.digest import digest_fields
from ipex_inductor.autotune import (
    batches,
    cost,
    fallback_sources,
    nearest_shape,
    own,
    predictor,
    ranges,
)
from ipex_inductor.autotune.cost import Model
from ipex_inductor.autotune.database import Records, problems_by_family, varying
from ipex_inductor.autotune.pool import Estimate, Pool, pool
from ipex_inductor.autotune.predictor import Guesser
from ipex_inductor.autotune.record import Choice, Problem, decode_problem, encode
from ipex_inductor.autotune.space import of_this_torch
from ipex_inductor.autotune.table import file_name

SHIPPED = Path(__file__).with_name("tables")
SOURCES = ("recorded", "shipped")
Place = tuple[str, bytes]  # the other sizes in words, and their problem
Places = Callable[[Problem, Path, batches.Batches], Iterable[Place]]


@dataclass(frozen=True)
class Selection:
    """The choice for one problem: its estimate, and that of the library's best call, if known.

    `source` is one of SOURCES, or "derived from" another GPU, or "model"; it also names other sizes
    and another torch, if the measurement is of these.
    """

    best: Estimate
    library: Estimate | None
    source: str

    @property
    def choice(self) -> Choice:
        """The choice to use."""
        return self.best.choice

    @property
    def is_measured(self) -> bool:
        """True if this problem itself was measured, on this GPU and with this torch."""
        return self.source in SOURCES

    def __str__(self) -> str:
        """Return one line: choice, time, the library's time, and source."""
        choice = self.choice
        parameters = "".join(f" {k}={v}" for k, v in choice.parameters.items())
        against = ""
        if self.library is not None and self.library.choice != choice:
            against = f", {self.library.choice.name} {self.library.p50:.4g}"
        return f"{choice.name}{parameters}: {self.best.p50:.4g} us{against}, {self.source}"


def lookup(problems: Collection[bytes], database: Path | None) -> dict[bytes, Selection]:
    """Return the selections of the `problems` (in canonical form) with records or a shipped entry.

    `database` is the user's; None for none. A problem has no selection if another torch's template
    won.
    """
    selections: dict[bytes, Selection] = {}
    for source, folder in zip(SOURCES, (database, SHIPPED), strict=True):
        missing = [p for p in problems if p not in selections]
        if missing and folder is not None and folder.exists():
            best = _best(missing, folder, source)
            failures = failed_choices(missing, database) if folder == SHIPPED else {}
            selections |= {
                key: selection
                for key, selection in best.items()
                if of_this_torch(selection.choice)
                and encode(selection.choice) not in failures.get(key, ())
            }
    return selections


def nearest(
    offered: Mapping[bytes, Collection[Choice]], database: Path | None
) -> dict[bytes, Selection]:
    """Return the selections of problems known only from another torch, batch or number of rows.

    It complements `lookup`, which covers this torch and the problem itself, and returns only
    choices in `offered`. The order is: the problem itself by another torch; other sizes by this
    torch; other sizes by any torch; and then all of these for equivalent problems
    (`fallback_sources`).
    """
    selections: dict[bytes, Selection] = {}
    failures = _failed_equivalents(offered, database)
    sources = [*zip(SOURCES, (database, SHIPPED), strict=True)]
    folders = [
        (source, f, problems_by_family(f)) for source, f in sources if f is not None and f.exists()
    ]
    for key, choices in offered.items():
        for place, folder, source, any_torch in _candidates(decode_problem(key), folders):
            best = _best([place], folder, source, any_torch).get(place)
            usable = best and best.choice in choices and of_this_torch(best.choice)
            if best and usable and encode(best.choice) not in failures.get(key, ()):
                selections[key] = best
                break
    return selections


def select_by_stand_in(
    offered: Mapping[bytes, Collection[Choice]], database: Path | None
) -> dict[bytes, Selection]:
    """Return the selections of problems on GPUs without a table, by the stand-in GPU's table.

    It covers our own ops: for the problem itself or as in `nearest`, the best of the choices that
    are also in `offered`.
    """
    problems = {key: decode_problem(key) for key in offered}
    ours = {key: p for key, p in problems.items() if p.op.startswith("ipex.")}
    covered = {key: p for key, p in ours.items() if table_of(p.arch) not in ("", p.arch)}
    if not covered:
        return {}
    selections: dict[bytes, Selection] = {}
    failures, families = _failed_equivalents(covered, database), problems_by_family(SHIPPED)
    for key, problem in covered.items():
        may = {*map(encode, offered[key])} - failures.get(key, set())
        stand_in = replace(problem, arch=table_of(problem.arch))
        for label, equivalent in fallback_sources.list_equivalents(stand_in):
            candidates = (
                *_itself(equivalent, SHIPPED, families),
                *_near_sizes(equivalent, SHIPPED, families),
            )
            sources = (
                (place, f"derived from {stand_in.arch}{size_label}{label}")
                for size_label, place in candidates
            )
            best = next(
                filter(None, (_best_of(place, may, origin) for place, origin in sources)), None
            )
            if best is not None:
                selections[key] = best
                break
    return selections


def select_by_neighbors(
    offered: Mapping[bytes, Collection[Choice]], database: Path | None
) -> dict[bytes, Selection]:
    """Return the selections of our convolutions and linear layers by neighbors in a table.

    The table is that of the GPU or of its stand-in. The choice is the template of the nearest
    neighbor that is in `offered`, or else the offered choice of that template with the nearest
    tile.
    """
    problems = {key: decode_problem(key) for key in offered}
    covered = {k: p for k, p in problems.items() if p.op.startswith("ipex.") and table_of(p.arch)}
    failures = _failed_equivalents(covered, database) if covered else {}
    selections: dict[bytes, Selection] = {}
    winners: dict[bytes, bool] = {}
    for key, problem in covered.items():
        may = [choice for choice in offered[key] if encode(choice) not in failures.get(key, ())]
        stand_in = replace(problem, arch=table_of(problem.arch))
        whose = "shipped" if stand_in == problem else f"derived from {stand_in.arch}"
        for label, equivalent in fallback_sources.list_equivalents(stand_in):
            best = _by_neighbors(equivalent, may, f"{whose} there", label, winners)
            if best is not None:
                selections[key] = best
                break
    return selections


def table_of(arch: str) -> str:
    """Return the architecture whose table serves `arch`: itself or its stand-in; "" for none."""
    architectures = (arch, fallback_sources.gpus().get(arch, ""))
    return next(
        (name for name in architectures if name and (SHIPPED / file_name(name)).exists()), ""
    )


def table_digest(arch: str) -> str:
    """Return the SHA-256 of the table that serves `arch`; "" for none."""
    table = table_of(arch)
    return hashlib.sha256((SHIPPED / file_name(table)).read_bytes()).hexdigest() if table else ""


def cost_model(arch: str) -> Model | None:
    """Return the user's own cost model of `arch`, else the shipped one; None without."""
    return cost.load(_folders(), arch)


def guesser(arch: str) -> Guesser | None:
    """Return the user's own predictor of `arch`, else the shipped one; None without."""
    return predictor.load(_folders(), arch)


def select_by_model(problem: Problem, choices: Iterable[Choice], usual: Choice) -> Selection | str:
    """Return the selection by the predictor, a template or `usual`, or the reason for none.

    `usual` is the library's choice. The reason is "" if there is no predictor for the architecture.
    """
    model = guesser(problem.arch)
    guess = model.guess(problem, choices) if model else ""
    if isinstance(guess, str):
        return guess
    template = Estimate(guess.template, guess.microseconds, math.inf)
    library = Estimate(usual, guess.library, math.inf)
    if guess.wins:
        return Selection(template, library, "model")
    summary = f"{guess.template.name} {guess.microseconds:.4g}, taken from {guess.margin:.3g} times"
    return Selection(library, library, f"model ({summary} as fast)")


def failed_choices(
    problems: Collection[bytes], database: Path | None, any_torch: bool = False
) -> dict[bytes, set[bytes]]:
    """Return by problem the choices that failed in its records.

    With `any_torch`, failures under other torches count as this one's.
    """
    if database is None or not database.exists():
        return {}
    pools = pool(Records(database, only=problems))
    for key, pooled in pools.items():
        if any_torch and fallback_sources.may(decode_problem(key)):
            fallback_sources.take_over(pooled)
    return {key: p.failed_choices() for key, p in pools.items()}


def digest(selected: Iterable[tuple[bytes, Choice]]) -> str:
    """Return the identity of the selections of a graph."""
    pairs = tuple(sorted((problem, encode(choice)) for problem, choice in selected))
    return digest_fields({"selected": pairs})


def _folders() -> list[Path]:
    """Return the folders of models: the user's, if no other user can write it, then ours."""
    return [*([own.default_folder()] if own.is_default_trusted() else []), SHIPPED]


def _failed_equivalents(
    problems: Collection[bytes], database: Path | None
) -> dict[bytes, set[bytes]]:
    """Return by problem the choices that failed, under any torch, on it or an equivalent."""
    equivalents = {
        key: [encode(p) for _, p in fallback_sources.list_equivalents(decode_problem(key))]
        for key in problems
    }
    failures = failed_choices({*itertools.chain(*equivalents.values())}, database, any_torch=True)
    return {
        key: set().union(*(failures.get(k, set()) for k in keys))
        for key, keys in equivalents.items()
    }


def _itself(problem: Problem, _: Path, __: batches.Batches) -> Iterable[Place]:
    """Return the problem itself as the only place to look."""
    return [("", encode(problem))]


def _candidates(
    problem: Problem, folders: Sequence[tuple[str, Path, batches.Batches]]
) -> Iterator[tuple[bytes, Path, str, bool]]:
    """Yield the places to look for a problem's choice, the best first.

    Each is a problem's canonical form, a folder, the source in words, and whether any torch counts.
    """
    ways: list[tuple[Places, bool]] = [(_itself, True), (_near_here, False), (_near_sizes, True)]
    for label, equivalent in fallback_sources.list_equivalents(problem):
        for (find_places, any_torch), (source, folder, families) in itertools.product(
            ways, folders
        ):
            if not any_torch or fallback_sources.may(problem):
                for size_label, place in find_places(equivalent, folder, families):
                    yield place, folder, f"{source}{size_label}{label}", any_torch


def _near_here(problem: Problem, folder: Path, families: batches.Batches) -> Iterator[Place]:
    """Yield the places of `_near_sizes` that this torch measured.

    Plain library calls belong to no torch; they count unless a nearer place is another torch's.
    """
    foreign = False
    for size_label, place in _near_sizes(problem, folder, families):
        # All records of the place may be refused as invalid: then the pool is empty.
        measured = pool(Records(folder, only={place})).get(place, Pool())
        bound = [s.choice for s in measured.samples.values() if s.choice.template]
        is_native = any(map(of_this_torch, bound))
        foreign |= bool(bound) and not is_native
        if is_native or not (foreign and fallback_sources.may(problem)):
            yield size_label, place


def _near_sizes(problem: Problem, _: Path, families: batches.Batches) -> Iterator[Place]:
    """Yield the known problems of another batch or number of rows, the nearest first."""
    for size, place in batches.find_nearest_sizes(problem, families):
        yield f" for {batches.WORDS[problem.op].format(size)}", place


def _best(
    keys: Collection[bytes], folder: Path, source: str, any_torch: bool = False
) -> dict[bytes, Selection]:
    """Return the selections by the records of each problem, or else of problems that imply them.

    Args:
        keys: the problems in canonical form.
        folder: the folder of records or tables.
        source: the source in words.
        any_torch: whether the newest other torch counts if this one has no records.
    """
    problems = {key: decode_problem(key) for key in keys}
    ranged = varying(folder)
    implied_by = {key: _others(problem, ranged) for key, problem in problems.items()}
    more = (key for ways in implied_by.values() for _, agreeing in ways for key in agreeing)
    pools = pool(Records(folder, only={*keys, *more}))
    whose: dict[bytes, str] = {}
    for key, pooled in pools.items():  # this torch's choices exclude other torches'
        bound = {k: s for k, s in pooled.samples.items() if s.choice.template}
        native = {k for k, s in bound.items() if of_this_torch(s.choice)}
        if native:
            pooled.samples = {
                k: s for k, s in pooled.samples.items() if k in native or k not in bound
            }
        elif any_torch:
            whose[key] = fallback_sources.take_over(pooled)
    selections = {}
    for key in keys:
        failures = pools[key].failed_choices() if key in pools else set()
        for label, ks in [("", [key]), *implied_by[key]]:
            best = _agree([pools.get(k) for k in ks], f"{source}{label}")
            if best and encode(best.choice) not in failures:
                selections[key] = _name_torch(best, whose.get(ks[-1], ""))
                break
    return selections


def _best_of(key: bytes, may: Collection[bytes] | None, source: str) -> Selection | None:
    """Return the selection by the package's record of `key` among the choices in `may`.

    Args:
        key: the problem in canonical form.
        may: the choices that may be taken, in canonical form; None for all.
        source: the source in words.
    """
    measured = pool(Records(SHIPPED, only={key})).get(key)
    if measured is None:
        return None
    bound = (s.choice for s in measured.samples.values() if s.choice.template)
    is_native = any(map(of_this_torch, bound)) or not fallback_sources.may(decode_problem(key))
    whose = "" if is_native else fallback_sources.take_over(measured)
    if may is not None:
        measured.samples = {k: s for k, s in measured.samples.items() if k in may}
    best = _agree([measured], source)
    return best and _name_torch(best, whose)


def _by_neighbors(
    problem: Problem, offered: Sequence[Choice], whose: str, label: str, winners: dict[bytes, bool]
) -> Selection | None:
    """Return the selection by the nearest neighbors; None if they do not agree.

    Args:
        problem: the problem, on the architecture of a table.
        offered: the choices that may be taken.
        whose: the table, in words.
        label: the label of an equivalent problem, or "".
        winners: a cache of whether a template won on a neighbor, by canonical form.
    """

    def won(neighbor: Problem) -> bool:
        """Return True if a template won on the neighbor, from the cache if possible."""
        key = encode(neighbor)
        if key not in winners:
            winners[key] = _won(key)
        return winners[key]

    near = nearest_shape.find_neighbors(problem, _shipped_by_kind(SHIPPED), won)
    sources = [
        f"{whose}, by a neighbor: {nearest_shape.words(neighbor_problem)}{label}"
        for neighbor_problem in near
    ]
    may = [*map(encode, offered)]
    for only in (may, None):
        for neighbor_problem, source in zip(near, sources, strict=True):
            best = _best_of(encode(neighbor_problem), only, source)
            if best is None or best.choice.kind != "template":
                continue
            tile = best.choice if only else nearest_shape.nearest_tile(best.choice, offered)
            if tile is not None:
                source = best.source + ", the nearest tile" * (tile != best.choice)
                return Selection(dataclasses.replace(best.best, choice=tile), None, source)
    return None


def _won(neighbor: bytes) -> bool:
    """Return True if a template was the best on the neighbor by `nearest_shape.MARGIN`."""
    best = _best_of(neighbor, None, "")
    if best is None or best.choice.kind != "template":
        return False
    return best.library is None or best.library.p50 >= nearest_shape.MARGIN * best.best.p50


@cache
def _shipped_by_kind(folder: Path) -> dict[nearest_shape.Kind, list[nearest_shape.Known]]:
    """Return the problems of the shipped tables that may be neighbors, by kind."""
    problems = itertools.chain(*problems_by_family(folder).values())
    return nearest_shape.by_kind(decode_problem(key) for _, key in problems)


def _name_torch(best: Selection, torch: str) -> Selection:
    """Return the selection with the other torch in its source, if its choice depends on one."""
    if not torch or not best.choice.template:
        return best
    return dataclasses.replace(best, source=f"{best.source} by {torch}")


def _others(problem: Problem, ranged: Mapping[bytes, Problem]) -> list[tuple[str, list[bytes]]]:
    """Return the problems whose agreement implies the best choice, nearest first, with a label.

    For an exact problem, these are the ranges that hold it; for a range, the two sizes at which it
    is measured.
    """
    if problem.symbols:
        return [(" at its middle and end", [*map(encode, ranges.points(problem))])]
    holding = [(ranges.width(r), key, r) for key, r in ranged.items() if ranges.holds(r, problem)]
    return [(f" for {ranges.text(r)}", [key]) for _, key, r in sorted(holding, key=lambda h: h[:2])]


def _agree(pools: Iterable[Pool | None], source: str) -> Selection | None:
    """Return the selection by the last pool if all pools agree on the best choice; else None."""
    all_pools = [*pools]
    bests = [pooled.best() if pooled else None for pooled in all_pools]
    best, last = bests[-1], all_pools[-1]
    if last is None or best is None or any(not b or b.choice != best.choice for b in bests):
        return None
    libraries = [e for e in last.estimates().values() if e.choice.kind == "library"]
    usual = [e for e in libraries if e.choice.name.startswith("aten.")] or libraries
    return Selection(best, min(usual, key=lambda e: e.p50, default=None), source)
