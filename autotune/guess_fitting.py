"""Fit the predictor to measurements, and find the classes of problems it may be used for.

Whole families of sizes are held out in turn and predicted by a fit on the others. A template is
used in a class only if every template that the margin would have taken did win, in at least three
families; the margin used in a family is the one derived from the other families.
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

FAMILIES = 3  # fewest families with a template, both in training and held out
ERRORS = 3.0  # standard deviations by which a margin exceeds the mean error of families
LEAST = 1.1  # smallest margin: a predicted gain must exceed what counts as a tie if measured
FACTOR, LAUNCH, BEHIND = 0.4, 1.0, (0.3, 0.3)  # initial values for a library's kernel

Kind = tuple[str, bool]


@dataclass(frozen=True)
class Known:
    """The measurements of a problem: microseconds of the library's best, and of templates."""

    problem: Problem
    library: float
    parts: LibraryParts
    templates: tuple[Seen, ...]
    failed: set[bytes]

    @property
    def kind(self) -> Kind:
        """The kind of the problem's class."""
        return predictor.kind_of(self.problem)


@dataclass(frozen=True)
class Held:
    """A template in a held-out family: its predicted and measured gain over the library."""

    kind: Kind
    family: int
    problem: Problem
    template: Choice
    predicted: float
    measured: float


def fit(records: Iterable[Record]) -> tuple[Guesser, list[Held]]:
    """Return the predictor for the records' one architecture, and its held-out predictions.

    Raises `ArgumentError` as `fitting.fit`.
    """
    pools = pool(records)
    problems = {key: decode_problem(key) for key in sorted(pools)}
    arch = fitting.single_architecture({problem.arch for problem in problems.values()})
    templates = {key: fitting.timed_templates(p, pools[key]) for key, p in problems.items()}
    dtypes = fitting.dtypes_of((p, templates[key]) for key, p in problems.items())
    candidates = (_measurement_of(p, pools[key], templates[key]) for key, p in problems.items())
    measurements = [m for m in candidates if m and m.problem.operands[0].dtype in dtypes]
    families = families_of([m.problem for m in measurements])
    predictions = []
    for family in sorted(set(families)):
        training = [m for m, f in zip(measurements, families, strict=True) if f != family]
        model, libraries = _model(training, arch, dtypes), _libraries(training)
        templates_by_kind = _templates(training, [f for f in families if f != family])
        held_out = (m for m, f in zip(measurements, families, strict=True) if f == family)
        predictions += [
            h
            for m in held_out
            for h in _predict_held_out(m, family, model, libraries, templates_by_kind)
        ]
    classes = tuple(
        _class(kind, measurements, families, [h for h in predictions if h.kind == kind])
        for kind in sorted({m.kind for m in measurements})
    )
    return Guesser(
        _model(measurements, arch, dtypes), _libraries(measurements), classes
    ), predictions


def families_of(problems: Sequence[Problem]) -> list[int]:
    """Return the number of each problem's family: problems that share sizes, also transitively.

    Single GEMMs share N or K of their weight; batched GEMMs share their count and largest size.
    """
    first: dict[tuple[int, int], int] = {}
    family = [*range(len(problems))]
    for i, problem in enumerate(problems):
        for size in predictor.shared_sizes(problem):
            joined = {family[i], family[first.setdefault(size, i)]}
            family = [min(joined) if f in joined else f for f in family]
    return family


def check_families(held: Iterable[Held]) -> dict[int, bool | None]:
    """Return by family whether all templates won that the margin of the others would take.

    The value is None for a family in which it would take none.
    """
    held = [*held]
    errors = errors_of(held)
    verdicts: dict[int, bool | None] = {}
    for family in errors:
        required = margin([error for number, error in errors.items() if number != family])
        taken = [h for h in held if h.family == family and h.predicted >= required]
        verdicts[family] = all(h.measured > 1 for h in taken) if taken else None
    return verdicts


def errors_of(held: Iterable[Held]) -> dict[int, float]:
    """Return by family the largest overestimate of a gain, as a logarithm."""
    errors: defaultdict[int, list[float]] = defaultdict(list)
    for prediction in held:
        errors[prediction.family].append(math.log(prediction.predicted / prediction.measured))
    return {family: max(values) for family, values in errors.items()}


def margin(errors: Sequence[float]) -> float:
    """Return the predicted gain to require, given the errors of families; inf for less than two."""
    if len(errors) < 2:
        return math.inf
    return max(LEAST, math.exp(statistics.fmean(errors) + ERRORS * statistics.stdev(errors)))


def _measurement_of(problem: Problem, pooled: Pool, templates: Sequence[Seen]) -> Known | None:
    """Return the measurements of a problem; None if the models cannot be fitted on it."""
    times = [e.p50 for e in pooled.estimates().values() if e.choice.kind == "library"]
    parts = predictor.library_parts(problem)
    if problem.settings or not times or parts is None:
        return None
    return Known(problem, min(times), parts, tuple(templates), pooled.failed_choices())


def _model(measurements: Sequence[Known], arch: str, dtypes: tuple[str, ...]) -> Model:
    """Return the cost model fitted on the templates of these problems."""
    return fitting.model_of([k.templates for k in measurements if k.templates], arch, dtypes, 0.0)


def _libraries(measurements: Sequence[Known]) -> Libraries:
    """Return the model of the library's kernels, fitted with the loss of the cost model."""
    ops = sorted({k.problem.op for k in measurements})
    times = tensor([math.log(k.library) for k in measurements])
    parts = tensor([k.parts.times for k in measurements]).log()
    of_op = tensor([[float(k.problem.op == op) for op in ops] for k in measurements])
    odd = tensor([[float(k.parts.odd)] for k in measurements])
    moved = tensor([k.parts.behind for k in measurements])
    # Factors of arithmetic and traffic for each op; the ridge keeps them near the common ones.
    common, by_op = tensor([FACTOR, FACTOR]), torch.zeros(len(ops), 2, dtype=torch.float64)
    unaligned, launch, epilogues = (
        torch.zeros(1, 2, dtype=torch.float64),
        tensor([LAUNCH]),
        tensor(BEHIND),
    )

    def loss() -> torch.Tensor:
        product = larger(parts + common + of_op @ by_op + odd @ unaligned, launch).exp()
        epilogue = (moved > 0) * (moved * epilogues[0].exp() + epilogues[1].exp())
        predicted = (product + epilogue).log()
        ridge = RIDGE * (by_op.square().sum() + unaligned.square().sum())
        return functional.huber_loss(predicted, times, delta=fitting.HUBER) + ridge

    minimize(loss, [common, by_op, unaligned, launch, epilogues])
    factors = {op: _pair(common + by_op[i]) for i, op in enumerate(ops)}
    return Libraries(factors, _pair(unaligned[0]), float(launch), _pair(epilogues))


def _pair(values: torch.Tensor) -> tuple[float, float]:
    """Return the two values of a tensor."""
    first, second = values.tolist()
    return first, second


def _judged_often(held: Iterable[Held]) -> tuple[Choice, ...]:
    """Return the templates with held-out predictions in enough families to be taken."""
    families: defaultdict[bytes, set[int]] = defaultdict(set)
    choices = {}
    for prediction in held:
        key = encode(prediction.template)
        choices[key] = prediction.template
        families[key].add(prediction.family)
    return tuple(choices[key] for key in sorted(choices) if len(families[key]) >= FAMILIES)


def _templates(
    measurements: Sequence[Known], families: Sequence[int]
) -> dict[Kind, dict[bytes, Choice]]:
    """Return by class the templates measured in enough families that never failed."""
    families_by_template: defaultdict[Kind, defaultdict[bytes, set[int]]] = defaultdict(
        lambda: defaultdict(set)
    )
    choices = {}
    for measurement, family in zip(measurements, families, strict=True):
        for choice, *_ in measurement.templates:
            key = encode(choice)
            choices[key] = choice
            families_by_template[measurement.kind][key].add(family)
    failed = {key for measurement in measurements for key in measurement.failed}
    return {
        kind: {k: choices[k] for k in sorted(f) if len(f[k]) >= FAMILIES and k not in failed}
        for kind, f in families_by_template.items()
    }


def _predict_held_out(
    measurement: Known,
    family: int,
    model: Model,
    libraries: Libraries,
    may: Mapping[Kind, Mapping[bytes, Choice]],
) -> list[Held]:
    """Return the held-out predictions of the measured templates that might be taken.

    Args:
        measurement: the measurements of a problem of the family.
        family: the number of the held-out family.
        model: the cost model, fitted on other families.
        libraries: the model of the library's kernels, fitted on other families.
        may: by class, the templates that may be taken, by canonical form.
    """
    library = libraries.microseconds(measurement.problem)
    predictions = []
    for choice, time, *_ in measurement.templates:
        microseconds = model.microseconds(measurement.problem, choice)
        if microseconds and library and encode(choice) in may.get(measurement.kind, {}):
            gains = library / microseconds, measurement.library / time
            predictions.append(Held(measurement.kind, family, measurement.problem, choice, *gains))
    return predictions


def _class(
    kind: Kind, measurements: Sequence[Known], families: Sequence[int], held: Sequence[Held]
) -> Class:
    """Return the class of this kind; it has no templates if the held-out predictions fail it."""
    mine = [(k.problem, f) for k, f in zip(measurements, families, strict=True) if k.kind == kind]
    count, verdict = len({family for _, family in mine}), check_families(held)
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
