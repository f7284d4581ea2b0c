"""What is known about problems: the best choice of each, and where that comes from.

The user's own records come first, then the tables that the package ships. What neither has is
measured where that is allowed; else what another torch's records say is taken, or what is best of a
convolution at the nearest batch, or of a linear layer at the nearest number of rows, or what the
table of a GPU that is much alike says, or what the nearest neighbors agree on, or a model may
guess, where it proved right on what it had not seen, and the rest is the library's.
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
from ipex_inductor.autotune.database import Records, batched, varying
from ipex_inductor.autotune.pool import Estimate, Pool, pool
from ipex_inductor.autotune.predictor import Guesser
from ipex_inductor.autotune.record import Choice, Problem, decode_problem, encode
from ipex_inductor.autotune.space import of_this_torch
from ipex_inductor.autotune.table import file_name

SHIPPED = Path(__file__).with_name("tables")
SOURCES = ("recorded", "shipped")
Place = tuple[str, bytes]  # which other sizes, in words, and the problem of those
Places = Callable[[Problem, Path, batches.Batches], Iterable[Place]]


@dataclass(frozen=True)
class Selection:
    """The choice for one problem: the estimates of it, and of the library's best, if any ran."""

    best: Estimate
    library: Estimate | None
    source: str  # of SOURCES, or derived from whose; for which other sizes, by whose torch; "model"

    @property
    def choice(self) -> Choice:
        """What is to be used."""
        return self.best.choice

    @property
    def measured(self) -> bool:
        """Whether on this very problem, and not on other sizes or by nobody."""
        return self.source in SOURCES

    def __str__(self) -> str:
        """One line: what, how fast, against what, from where."""
        choice = self.choice
        given = "".join(f" {k}={v}" for k, v in choice.parameters.items())
        against = ""
        if self.library is not None and self.library.choice != choice:
            against = f", {self.library.choice.name} {self.library.p50:.4g}"
        return f"{choice.name}{given}: {self.best.p50:.4g} us{against}, {self.source}"


def lookup(problems: Collection[bytes], database: Path | None) -> dict[bytes, Selection]:
    """The selections of those `problems` (in canonical form) of which something is known.

    `database` is the user's, None for none. Where a template of another torch won, nothing is.
    """
    found: dict[bytes, Selection] = {}
    for source, folder in zip(SOURCES, (database, SHIPPED), strict=True):
        missing = [p for p in problems if p not in found]
        if missing and folder is not None and folder.exists():
            best = _best(missing, folder, source)
            out = failed(missing, database) if folder == SHIPPED else {}
            found |= {
                key: each
                for key, each in best.items()
                if of_this_torch(each.choice) and encode(each.choice) not in out.get(key, ())
            }
    return found


def nearest(
    offered: Mapping[bytes, Collection[Choice]], database: Path | None
) -> dict[bytes, Selection]:
    """The selections of those problems that are known by another torch, or at another batch.

    Or number of rows. As of `lookup`, which is for what is known here of the very problem; of what
    is `offered` for it. First the very problem by another torch, then others by this one, then by
    any; last all of that of what is `alike`.
    """
    found: dict[bytes, Selection] = {}
    out = _failed_alike(offered, database)
    known = [*zip(SOURCES, (database, SHIPPED), strict=True)]
    folders = [(source, f, batched(f)) for source, f in known if f is not None and f.exists()]
    for key, choices in offered.items():
        for other, folder, source, any_torch in _candidates(decode_problem(key), folders):
            best = _best([other], folder, source, any_torch).get(other)
            usable = best and best.choice in choices and of_this_torch(best.choice)
            if best and usable and encode(best.choice) not in out.get(key, ()):
                found[key] = best
                break
    return found


def derived(
    offered: Mapping[bytes, Collection[Choice]], database: Path | None
) -> dict[bytes, Selection]:
    """The selections of problems on GPUs without a table, by the one that stands in for theirs.

    Of ops of ours: of the very problem or as `nearest`, the best of what is `offered` here too.
    """
    problems = {key: decode_problem(key) for key in offered}
    ours = {key: p for key, p in problems.items() if p.op.startswith("ipex.")}
    asked = {key: p for key, p in ours.items() if table_of(p.arch) not in ("", p.arch)}
    if not asked:
        return {}
    found: dict[bytes, Selection] = {}
    out, known = _failed_alike(asked, database), batched(SHIPPED)
    for key, problem in asked.items():
        may = {*map(encode, offered[key])} - out.get(key, set())
        there = replace(problem, arch=table_of(problem.arch))
        for told, alike in fallback_sources.alike(there):
            near = (*_itself(alike, SHIPPED, known), *_near(alike, SHIPPED, known))
            sources = ((other, f"derived from {there.arch}{where}{told}") for where, other in near)
            best = next(filter(None, (_best_of(other, may, by) for other, by in sources)), None)
            if best is not None:
                found[key] = best
                break
    return found


def neighboring(
    offered: Mapping[bytes, Collection[Choice]], database: Path | None
) -> dict[bytes, Selection]:
    """The selections of convolutions and linear layers of ours by their `neighbors` in the package.

    By the table of the GPU or of its stand-in: the template of the nearest that is `offered` too,
    or the tile of that template that comes nearest.
    """
    problems = {key: decode_problem(key) for key in offered}
    asked = {k: p for k, p in problems.items() if p.op.startswith("ipex.") and table_of(p.arch)}
    out = _failed_alike(asked, database) if asked else {}
    found: dict[bytes, Selection] = {}
    judged: dict[bytes, bool] = {}
    for key, problem in asked.items():
        may = [choice for choice in offered[key] if encode(choice) not in out.get(key, ())]
        there = replace(problem, arch=table_of(problem.arch))
        whose = "shipped" if there == problem else f"derived from {there.arch}"
        for told, alike in fallback_sources.alike(there):
            best = _by_neighbors(alike, may, f"{whose} there", told, judged)
            if best is not None:
                found[key] = best
                break
    return found


def table_of(arch: str) -> str:
    """The architecture whose table the package has for `arch`: its own, a stand-in, or none, ""."""
    known = (arch, fallback_sources.gpus().get(arch, ""))
    return next((each for each in known if each and (SHIPPED / file_name(each)).exists()), "")


def table_digest(arch: str) -> str:
    """The identity of the table that the package has for `arch`, "" where there is none."""
    table = table_of(arch)
    return hashlib.sha256((SHIPPED / file_name(table)).read_bytes()).hexdigest() if table else ""


def cost_model(arch: str) -> Model | None:
    """The user's own model of that architecture, or the one that the package ships."""
    return cost.load(_folders(), arch)


def guesser(arch: str) -> Guesser | None:
    """What guesses on that architecture, as `cost_model`."""
    return predictor.load(_folders(), arch)


def guessed(problem: Problem, choices: Iterable[Choice], usual: Choice) -> Selection | str:
    """What the model takes of `choices`, a template or the library's `usual`; or why none.

    The reason is "" where there is no model.
    """
    known = guesser(problem.arch)
    found = known.guess(problem, choices) if known else ""
    if isinstance(found, str):
        return found
    template = Estimate(found.template, found.microseconds, math.inf)
    library = Estimate(usual, found.library, math.inf)
    if found.wins:
        return Selection(template, library, "model")
    besides = f"{found.template.name} {found.microseconds:.4g}, taken from {found.margin:.3g} times"
    return Selection(library, library, f"model ({besides} as fast)")


def failed(
    problems: Collection[bytes], database: Path | None, any_torch: bool = False
) -> dict[bytes, set[bytes]]:
    """By problem: the choices that failed by its records, those of `any_torch` as this one's."""
    if database is None or not database.exists():
        return {}
    pools = pool(Records(database, only=problems))
    for key, each in pools.items():
        if any_torch and fallback_sources.may(decode_problem(key)):
            fallback_sources.take_over(each)
    return {key: p.failed() for key, p in pools.items()}


def digest(selected: Iterable[tuple[bytes, Choice]]) -> str:
    """The identity of what was selected for a graph."""
    pairs = tuple(sorted((problem, encode(choice)) for problem, choice in selected))
    return digest_fields({"selected": pairs})


def _folders() -> list[Path]:
    """Of models: our own, if nobody else can write it, before the package's."""
    return [*([own.default_folder()] if own.trusted() else []), SHIPPED]


def _failed_alike(problems: Collection[bytes], database: Path | None) -> dict[bytes, set[bytes]]:
    """By problem: what failed by any torch of it, or of what stands in for it."""
    alike = {
        key: [encode(p) for _, p in fallback_sources.alike(decode_problem(key))] for key in problems
    }
    out = failed({*itertools.chain(*alike.values())}, database, any_torch=True)
    return {key: set().union(*(out.get(k, set()) for k in keys)) for key, keys in alike.items()}


def _itself(problem: Problem, _: Path, __: batches.Batches) -> Iterable[Place]:
    """The very problem."""
    return [("", encode(problem))]


def _candidates(
    problem: Problem, folders: Sequence[tuple[str, Path, batches.Batches]]
) -> Iterator[tuple[bytes, Path, str, bool]]:
    """What may be known instead of `problem`: of which one, where, in words, and by any torch."""
    ways: list[tuple[Places, bool]] = [(_itself, True), (_near_here, False), (_near, True)]
    for told, alike in fallback_sources.alike(problem):
        for (places, any_torch), (source, folder, known) in itertools.product(ways, folders):
            if not any_torch or fallback_sources.may(problem):
                for where, other in places(alike, folder, known):
                    yield other, folder, f"{source}{where}{told}", any_torch


def _near_here(problem: Problem, folder: Path, known: batches.Batches) -> Iterator[Place]:
    """Those of `_near` that this torch measured.

    What is of no torch, plain calls of a library, counts unless another torch's is nearer.
    """
    foreign = False
    for where, other in _near(problem, folder, known):
        measured = pool(Records(folder, only={other})).get(other, Pool())  # none of it may be right
        bound = [s.choice for s in measured.samples.values() if s.choice.template]
        here = any(map(of_this_torch, bound))
        foreign |= bool(bound) and not here
        if here or not (foreign and fallback_sources.may(problem)):
            yield where, other


def _near(problem: Problem, _: Path, known: batches.Batches) -> Iterator[Place]:
    """The problems of another batch or number of rows that are known, the nearest first."""
    for size, other in batches.near(problem, known):
        yield f" for {batches.WORDS[problem.op].format(size)}", other


def _best(
    keys: Collection[bytes], folder: Path, source: str, any_torch: bool = False
) -> dict[bytes, Selection]:
    """By records of the very problem, or else of others that say what is best for it too.

    With `any_torch` what the newest other torch says counts where this one's say nothing.
    """
    problems = {key: decode_problem(key) for key in keys}
    ranged = varying(folder)
    others = {key: _others(problem, ranged) for key, problem in problems.items()}
    more = (key for ways in others.values() for _, agreeing in ways for key in agreeing)
    pools = pool(Records(folder, only={*keys, *more}))
    whose: dict[bytes, str] = {}
    for key, each in pools.items():  # other torches' choices do not count beside those of this
        bound = {k: s for k, s in each.samples.items() if s.choice.template}
        own = {k for k, s in bound.items() if of_this_torch(s.choice)}
        if own:
            each.samples = {k: s for k, s in each.samples.items() if k in own or k not in bound}
        elif any_torch:
            whose[key] = fallback_sources.take_over(each)
    found = {}
    for key in keys:
        out = pools[key].failed() if key in pools else set()
        for where, ks in [("", [key]), *others[key]]:
            best = _agreed([pools.get(k) for k in ks], f"{source}{where}")
            if best and encode(best.choice) not in out:
                found[key] = _said(best, whose.get(ks[-1], ""))
                break
    return found


def _best_of(key: bytes, may: Collection[bytes] | None, source: str) -> Selection | None:
    """By the package's record of `key`: of the choices that `may` be taken (in canonical form)."""
    measured = pool(Records(SHIPPED, only={key})).get(key)
    if measured is None:
        return None
    bound = (s.choice for s in measured.samples.values() if s.choice.template)
    here = any(map(of_this_torch, bound)) or not fallback_sources.may(decode_problem(key))
    whose = "" if here else fallback_sources.take_over(measured)
    if may is not None:
        measured.samples = {k: s for k, s in measured.samples.items() if k in may}
    best = _agreed([measured], source)
    return best and _said(best, whose)


def _by_neighbors(
    problem: Problem, offered: Sequence[Choice], whose: str, told: str, judged: dict[bytes, bool]
) -> Selection | None:
    """`judged`: which of them a template won, as far as that was asked."""

    def won(neighbor: Problem) -> bool:
        key = encode(neighbor)
        if key not in judged:
            judged[key] = _won(key)
        return judged[key]

    near = nearest_shape.near(problem, _shipped_by_kind(SHIPPED), won)
    sources = [f"{whose}, by a neighbor: {nearest_shape.words(each)}{told}" for each in near]
    may = [*map(encode, offered)]
    for only in (may, None):
        for each, source in zip(near, sources, strict=True):
            best = _best_of(encode(each), only, source)
            if best is None or best.choice.kind != "template":
                continue
            tile = best.choice if only else nearest_shape.nearest_tile(best.choice, offered)
            if tile is not None:
                source = best.source + ", the nearest tile" * (tile != best.choice)
                return Selection(dataclasses.replace(best.best, choice=tile), None, source)
    return None


def _won(neighbor: bytes) -> bool:
    """Whether a template was the best there, by the margin that neighbors are asked for."""
    best = _best_of(neighbor, None, "")
    if best is None or best.choice.kind != "template":
        return False
    return best.library is None or best.library.p50 >= nearest_shape.MARGIN * best.best.p50


@cache
def _shipped_by_kind(folder: Path) -> dict[nearest_shape.Kind, list[nearest_shape.Known]]:
    """What the package's tables have that may be a neighbor."""
    known = itertools.chain(*batched(folder).values())
    return nearest_shape.by_kind(decode_problem(key) for _, key in known)


def _said(best: Selection, torch: str) -> Selection:
    """The same, and by which other torch, where its choice is of one."""
    if not torch or not best.choice.template:
        return best
    return dataclasses.replace(best, source=f"{best.source} by {torch}")


def _others(problem: Problem, ranged: Mapping[bytes, Problem]) -> list[tuple[str, list[bytes]]]:
    """What else says what is best for `problem`, the nearest first: where, and problems to agree.

    For one size, each range that holds it; for a range, the two sizes that it is measured at.
    """
    if problem.symbols:
        return [(" at its middle and end", [*map(encode, ranges.points(problem))])]
    holding = [(ranges.width(r), key, r) for key, r in ranged.items() if ranges.holds(r, problem)]
    return [(f" for {ranges.text(r)}", [key]) for _, key, r in sorted(holding, key=lambda h: h[:2])]


def _agreed(pools: Iterable[Pool | None], source: str) -> Selection | None:
    """The choice that is the best in all of them, as it is in the last."""
    known = [*pools]
    bests = [each.best() if each else None for each in known]
    best, last = bests[-1], known[-1]
    if last is None or best is None or any(not b or b.choice != best.choice for b in bests):
        return None
    libraries = [e for e in last.estimates().values() if e.choice.kind == "library"]
    usual = [e for e in libraries if e.choice.name.startswith("aten.")] or libraries
    return Selection(best, min(usual, key=lambda e: e.p50, default=None), source)
