"""Fit what guesses to measurements, and find the classes of problems where it may.

Whole families of sizes are held out, one after the other, and predicted by what the others teach.
A template is taken in a class where all that the margin would have taken did win, in three families
at least; the margin in each family is the one that the others make.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from ipex_inductor.autotune import fitting, predictor
from ipex_inductor.autotune.cost import Model
from ipex_inductor.autotune.fitting import RIDGE, Seen, larger, minimize, tensor
from ipex_inductor.autotune.pool import Pool, pool
from ipex_inductor.autotune.predictor import Class, Guesser, Libraries, LibraryParts
from ipex_inductor.autotune.record import Choice, Problem, Record, decode_problem, encode

FAMILIES = 3  # that a template was measured in, and as many again with one of them held out
ERRORS = 3.0  # standard deviations among families that a margin is beyond their mean error
LEAST = 1.1  # of a margin: unmeasured, a gain must be worth more than what ties when measured
FACTOR, LAUNCH, BEHIND = 0.4, 1.0, (0.3, 0.3)  # of a library's kernel, before any record

Kind = tuple[str, bool]


@dataclass(frozen=True)
class Known:
    """What was measured of a problem: microseconds of the library's best, and of templates."""

    problem: Problem
    library: float
    parts: LibraryParts
    templates: tuple[Seen, ...]
    failed: set[bytes]

    @property
    def kind(self) -> Kind:
        """Of its class."""
        return predictor.kind_of(self.problem)


@dataclass(frozen=True)
class Held:
    """A template in a family that was held out: its gain over the library, as said and as is."""

    kind: Kind
    family: int
    problem: Problem
    template: Choice
    predicted: float
    measured: float


def fit(records: Iterable[Record]) -> tuple[Guesser, list[Held]]:
    """What guesses on the records' one architecture, and what it said of families held out.

    Raises `ArgumentError` as `fitting.fit`.
    """
    pools = pool(records)
    problems = {key: decode_problem(key) for key in sorted(pools)}
    arch = fitting.one({problem.arch for problem in problems.values()})
    templates = {key: fitting.seen(p, pools[key]) for key, p in problems.items()}
    dtypes = fitting.dtypes_of((p, templates[key]) for key, p in problems.items())
    found = (_known(p, pools[key], templates[key]) for key, p in problems.items())
    known = [k for k in found if k and k.problem.operands[0].dtype in dtypes]
    families = families_of([k.problem for k in known])
    held = []
    for family in sorted(set(families)):
        others = [k for k, f in zip(known, families, strict=True) if f != family]
        model, libraries = _model(others, arch, dtypes), _libraries(others)
        may = _templates(others, [f for f in families if f != family])
        mine = (k for k, f in zip(known, families, strict=True) if f == family)
        held += [h for k in mine for h in _held(k, family, model, libraries, may)]
    classes = tuple(
        _class(kind, known, families, [h for h in held if h.kind == kind])
        for kind in sorted({k.kind for k in known})
    )
    return Guesser(_model(known, arch, dtypes), _libraries(known), classes), held


def families_of(problems: Sequence[Problem]) -> list[int]:
    """A number for each: the same for those that share sizes, also by way of others.

    A layer shares sizes of its weight; products in a batch their number and largest size.
    """
    first: dict[tuple[int, int], int] = {}
    family = [*range(len(problems))]
    for i, problem in enumerate(problems):
        for size in predictor.shared_sizes(problem):
            joined = {family[i], family[first.setdefault(size, i)]}
            family = [min(joined) if f in joined else f for f in family]
    return family


def judged(held: Iterable[Held]) -> dict[int, bool | None]:
    """By family: whether all won that the margin of the other families would have taken.

    None for a family of which it would have taken nothing.
    """
    held = [*held]
    errors = errors_of(held)
    found: dict[int, bool | None] = {}
    for family in errors:
        least = margin([error for other, error in errors.items() if other != family])
        taken = [h for h in held if h.family == family and h.predicted >= least]
        found[family] = all(h.measured > 1 for h in taken) if taken else None
    return found


def errors_of(held: Iterable[Held]) -> dict[int, float]:
    """By family: the logarithm of how much too much gain was said at worst."""
    errors: defaultdict[int, list[float]] = defaultdict(list)
    for each in held:
        errors[each.family].append(math.log(each.predicted / each.measured))
    return {family: max(found) for family, found in errors.items()}


def margin(errors: Sequence[float]) -> float:
    """The gain that must be said, by the errors of families; endless where that is not known."""
    if len(errors) < 2:
        return math.inf
    return max(LEAST, math.exp(statistics.fmean(errors) + ERRORS * statistics.stdev(errors)))


def _known(problem: Problem, pooled: Pool, templates: Sequence[Seen]) -> Known | None:
    """None for what no model can learn from."""
    times = [e.p50 for e in pooled.estimates().values() if e.choice.kind == "library"]
    parts = predictor.library_parts(problem)
    if problem.settings or not times or parts is None:
        return None
    return Known(problem, min(times), parts, tuple(templates), pooled.failed())


def _model(known: Sequence[Known], arch: str, dtypes: tuple[str, ...]) -> Model:
    return fitting.model_of([k.templates for k in known if k.templates], arch, dtypes, 0.0)


def _libraries(known: Sequence[Known]) -> Libraries:
    """The library's kernels: a loss as that of templates, of far fewer factors."""
    ops = sorted({k.problem.op for k in known})
    times = tensor([math.log(k.library) for k in known])
    parts = tensor([k.parts.times for k in known]).log()
    of_op = tensor([[float(k.problem.op == op) for op in ops] for k in known])
    odd = tensor([[float(k.parts.odd)] for k in known])
    moved = tensor([k.parts.behind for k in known])
    # Factors of arithmetic and traffic, apart for each op, by ridge near their common one.
    common, apart = tensor([FACTOR, FACTOR]), torch.zeros(len(ops), 2, dtype=torch.float64)
    oddly, launch, behind = torch.zeros(1, 2, dtype=torch.float64), tensor([LAUNCH]), tensor(BEHIND)

    def loss() -> torch.Tensor:
        product = larger(parts + common + of_op @ apart + odd @ oddly, launch).exp()
        epilogue = (moved > 0) * (moved * behind[0].exp() + behind[1].exp())
        found = (product + epilogue).log()
        ridge = RIDGE * (apart.square().sum() + oddly.square().sum())
        return functional.huber_loss(found, times, delta=fitting.HUBER) + ridge

    minimize(loss, [common, apart, oddly, launch, behind])
    factors = {op: _pair(common + apart[i]) for i, op in enumerate(ops)}
    return Libraries(factors, _pair(oddly[0]), float(launch), _pair(behind))


def _pair(values: torch.Tensor) -> tuple[float, float]:
    first, second = values.tolist()
    return first, second


def _judged_often(held: Iterable[Held]) -> tuple[Choice, ...]:
    """The templates that were judged in enough families, as all are that may be taken."""
    families: defaultdict[bytes, set[int]] = defaultdict(set)
    choices = {}
    for each in held:
        key = encode(each.template)
        choices[key] = each.template
        families[key].add(each.family)
    return tuple(choices[key] for key in sorted(choices) if len(families[key]) >= FAMILIES)


def _templates(known: Sequence[Known], families: Sequence[int]) -> dict[Kind, dict[bytes, Choice]]:
    """By class: what was measured in enough families of it, and failed in no record at all."""
    met: defaultdict[Kind, defaultdict[bytes, set[int]]] = defaultdict(lambda: defaultdict(set))
    choices = {}
    for each, family in zip(known, families, strict=True):
        for choice, *_ in each.templates:
            key = encode(choice)
            choices[key] = choice
            met[each.kind][key].add(family)
    failed = {key for each in known for key in each.failed}
    return {
        kind: {k: choices[k] for k in sorted(f) if len(f[k]) >= FAMILIES and k not in failed}
        for kind, f in met.items()
    }


def _held(
    known: Known,
    family: int,
    model: Model,
    libraries: Libraries,
    may: Mapping[Kind, Mapping[bytes, Choice]],
) -> list[Held]:
    """All templates that might be taken and that were measured."""
    library = libraries.microseconds(known.problem)
    found = []
    for choice, time, *_ in known.templates:
        said = model.microseconds(known.problem, choice)
        if said and library and encode(choice) in may.get(known.kind, {}):
            gains = library / said, known.library / time
            found.append(Held(known.kind, family, known.problem, choice, *gains))
    return found


def _class(
    kind: Kind, known: Sequence[Known], families: Sequence[int], held: Sequence[Held]
) -> Class:
    mine = [(k.problem, f) for k, f in zip(known, families, strict=True) if k.kind == kind]
    count, verdict = len({family for _, family in mine}), judged(held)
    won = sum(good is True for good in verdict.values())
    measures = [m for p, _ in mine if (m := predictor.measures(p))]
    reason = ""
    if count <= FAMILIES:
        reason = f"families of sizes that were measured: {count} of the {FAMILIES + 1} it takes"
    elif won < FAMILIES or False in verdict.values():
        reason = f"held out, templates said to win did in {won} of {count} families of sizes"
    return Class(
        *kind,
        epilogues=tuple(sorted({op for p, _ in mine for op in predictor.epilogue_ops(p)})),
        layouts=tuple(sorted({predictor.layouts(p) for p, _ in mine})),
        low=tuple(map(min, zip(*measures, strict=True))),
        high=tuple(map(max, zip(*measures, strict=True))),
        margin=1.0 if reason else margin([*errors_of(held).values()]),
        templates=() if reason else _judged_often(held),
        reason=reason,
    )
