"""Fit the cost model to records, and say how good it is on problems that it has not seen."""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from msgspec.structs import replace
from torch import Tensor
from torch.nn import functional

from ipex_inductor.autotune import cost
from ipex_inductor.autotune.cost import SHARPNESS, Model
from ipex_inductor.autotune.pool import Pool, pool
from ipex_inductor.autotune.record import Choice, Problem, Record, decode_problem
from ipex_inductor.errors import ArgumentError

FEWEST = 20  # problems, of which a tenth is held out at a time
FOLDS = 10
STEPS, ENOUGH = 400, 1e-7  # of L-BFGS at most; what it gains by one at least
RIDGE = 1e-3  # on all factors that depend on a tile's shape
HUBER = 0.3  # beyond that relative error what is far off counts linearly
WORD = 0.3  # the weight of a time by another tool's word
PAIRS = 5  # of such a time and our own, or nothing is known of what it has besides the kernel

# The factors before any record: half of the peak rate, two thirds of the bandwidth, 0.4 us a step.
FIRST_TILE, FIRST_LIBRARY, FIRST_LAUNCH = (0.5, 0.0, 0.35, -0.9), (0.5, 0.4, 1.3), 0.4

# How many times as fast as the library's kernel a template must be said to be, to be taken without
# a measurement: for each op the least of these by which no held-out problem lost more than `LOSS`,
# and all of them together gained `GAIN`.
MARGINS, LOSS, GAIN = (1.1, 1.25, 1.5, 2.0), 0.1, 1.05
CHOSEN = 4  # held-out problems at least that it was taken for


@dataclass(frozen=True)
class Quality:
    """What the model is worth, each problem predicted by a model fitted on others.

    `lost`: by what share the best of so many choices, ranked by the model, is slower than the best
    of all (mean, worst); `gained`: by op, how many times as fast as the library's kernels those are
    that the model takes, and how many.
    """

    error: float
    lost: dict[int, tuple[float, float]]
    gained: dict[str, tuple[float, int]]


@dataclass(frozen=True)
class _Rows:
    """Logarithms of the times of templates; what the model sees of each; whose problem's it is."""

    times: Tensor
    parts: Tensor
    features: Tensor
    weights: Tensor
    problems: Tensor


@dataclass(frozen=True)
class _Library:
    """The same of a library's fastest kernel."""

    op: str
    time: float
    parts: tuple[float, float]


def fit(records: Iterable[Record]) -> tuple[Model, Quality]:
    """The model of the records' one architecture, and its quality.

    Raises `ArgumentError` for several architectures, for one without a description, and for less
    than 20 problems with templates.
    """
    pools = pool(records)
    problems = {key: decode_problem(key) for key in pools}
    arch = _one({problem.arch for problem in problems.values()})
    known = [(problems[key], pools[key]) for key in sorted(pools)]
    extra = _besides([each for _, each in known])
    rows, libraries, choices, dtypes = _rows(known, extra)
    if len(libraries) < FEWEST:
        came = f"{len(libraries)} of {len(known)}"
        todo = "Record more: ipex-inductor autotune run."
        raise ArgumentError(f"{FEWEST} problems with a template that was timed", came, todo)
    tiles, launch = _fit_tiles(rows)
    model = Model(
        arch,
        tuple(sorted(dtypes)),
        tuple(tuple(row) for row in tiles.tolist()),
        launch,
        {op: _fit_library([x for x in libraries if x.op == op]) for op in _ops(libraries)},
        tuple(sorted({choice.name for choice in choices})),
        {},
        0.0,
        len(libraries),
    )
    quality, margins = _held_out(rows, libraries)
    return replace(model, error=quality.error, margins=margins), quality


def _rows(
    known: Sequence[tuple[Problem, Pool]], extra: float | None
) -> tuple[_Rows, list[_Library], list[Choice], set[str]]:
    times, parts, features, weights, numbers = [], [], [], [], []
    libraries: list[_Library] = []
    choices: list[Choice] = []
    dtypes: set[str] = set()
    for problem, pooled in known:
        library = cost.library_parts_of(problem)
        timed = [e for e in pooled.estimates().values() if e.choice.kind == "library"]
        templates = [*_template_times(pooled, extra)]
        seen = [(c, t, w, cost.parts_of(problem, c)) for c, t, w in templates]
        if library is None or not timed or not any(p for *_, p in seen):
            continue
        for choice, time, weight, found in seen:
            tile = cost.tile_of(choice)
            if found is None or tile is None:
                continue
            times.append(math.log(time))
            parts.append([*map(math.log, found.times)])
            features.append(cost.features(choice, tile, found))
            weights.append(weight)
            numbers.append(len(libraries))
            choices.append(choice)
        dtypes.add(problem.operands[0].dtype)
        fastest = min(e.p50 for e in timed)
        libraries.append(_Library(problem.op, math.log(fastest), library))
    rows = _Rows(
        _tensor(times), _tensor(parts), _tensor(features), _tensor(weights), torch.tensor(numbers)
    )
    return rows, libraries, choices, dtypes


def _template_times(pooled: Pool, extra: float | None) -> Iterable[tuple[Choice, float, float]]:
    """Each template's time and what it counts for: measured, or else by another tool's word."""
    measured = pooled.estimates()
    for estimate in measured.values():
        if estimate.choice.kind == "template":
            yield estimate.choice, estimate.p50, 1.0
    for key, told in pooled.reported().items():
        if extra is not None and key not in measured and told.choice.kind == "template":
            yield told.choice, max(told.p50 - extra, 0.3 * told.p50), WORD


def _besides(pools: Sequence[Pool]) -> float | None:
    """Microseconds that another tool's times have and ours have not: a launch, mostly."""
    pairs = [
        told.p50 - measured[key].p50
        for each in pools
        for measured in [each.estimates()]
        for key, told in each.reported().items()
        if key in measured
    ]
    return statistics.median(pairs) if len(pairs) >= PAIRS else None


def _fit_tiles(rows: _Rows, mask: Tensor | None = None) -> tuple[Tensor, float]:
    mask = torch.ones_like(rows.problems, dtype=torch.bool) if mask is None else mask
    factors = torch.zeros(4, rows.features.shape[1], dtype=torch.float64)
    factors[:, 0] = _tensor(FIRST_TILE)
    launch = _tensor([FIRST_LAUNCH])

    def loss() -> Tensor:
        found = _larger(rows.parts[mask] + rows.features[mask] @ factors.t(), launch)
        off = functional.huber_loss(found, rows.times[mask], reduction="none", delta=HUBER)
        return (rows.weights[mask] * off).mean() + RIDGE * factors[:, 1:].square().sum()

    _minimize(loss, [factors, launch])
    return factors.detach(), float(launch.detach())


def _fit_library(libraries: Sequence[_Library]) -> tuple[float, ...]:
    parts = _tensor([x.parts for x in libraries]).log()
    times, first = _tensor([x.time for x in libraries]), _tensor(FIRST_LIBRARY)
    factors = first.clone()

    def loss() -> Tensor:
        found = _larger(parts + factors[:2], factors[2:])
        off = functional.huber_loss(found, times, delta=HUBER)
        return off + RIDGE * (factors - first).square().sum()

    _minimize(loss, [factors])
    return tuple(factors.tolist())


def _held_out(rows: _Rows, libraries: Sequence[_Library]) -> tuple[Quality, dict[str, float]]:
    """Every tenth problem in turns, predicted by what the others teach."""
    fold = torch.arange(len(libraries)) % FOLDS
    found, whole = torch.zeros_like(rows.times), [0.0] * len(libraries)
    for number in range(FOLDS):
        out = fold[rows.problems] == number
        factors, launch = _fit_tiles(rows, ~out)
        found[out] = _larger(rows.parts[out] + rows.features[out] @ factors.t(), _tensor([launch]))
        for i in range(number, len(libraries), FOLDS):
            own = libraries[i]
            others = [x for j, x in enumerate(libraries) if x.op == own.op and j % FOLDS != number]
            known = _fit_library(others) if others else FIRST_LIBRARY
            whole[i] = float(
                _larger(_tensor([own.parts]).log() + _tensor(known[:2]), _tensor(known[2:]))
            )
    ranked = []
    for i in range(len(libraries)):
        mine = rows.problems == i
        ranked.append(sorted(zip(found[mine].tolist(), rows.times[mine].tolist(), strict=True)))
    lost = {}
    for count in (1, 5, 8, 12):
        shares = [min(t for _, t in r[:count]) - min(t for _, t in r) for r in ranked]
        lost[count] = (math.expm1(statistics.fmean(shares)), math.expm1(max(shares)))
    margins, gained = {}, {}
    for op in _ops(libraries):
        said_and_true = [
            (whole[i] - ranked[i][0][0], x.time - ranked[i][0][1])
            for i, x in enumerate(libraries)
            if x.op == op
        ]
        for margin in MARGINS:
            true = [t for said, t in said_and_true if said >= math.log(margin)]
            gain = math.exp(statistics.fmean(true)) if true else 0.0
            if len(true) >= CHOSEN and min(true) >= math.log1p(-LOSS) and gain >= GAIN:
                margins[op], gained[op] = margin, (gain, len(true))
                break
    error = math.expm1(float((found - rows.times).abs().median()))
    return Quality(error, lost, gained), margins


def _larger(times: Tensor, least: Tensor) -> Tensor:
    """As `cost._larger`, of rows."""
    every = torch.cat([times, least.expand(times.shape[0], 1)], 1)
    return torch.logsumexp(SHARPNESS * every, 1) / SHARPNESS


def _minimize(loss: Callable[[], Tensor], values: list[Tensor]) -> None:
    for value in values:
        value.requires_grad_()
    optimizer = torch.optim.LBFGS(
        values, max_iter=STEPS, tolerance_change=ENOUGH, line_search_fn="strong_wolfe"
    )

    def closure() -> float:
        optimizer.zero_grad()
        found = loss()
        found.backward()  # type: ignore[no-untyped-call]
        return float(found.detach())

    optimizer.step(closure)  # type: ignore[no-untyped-call]


def _tensor(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _ops(libraries: Sequence[_Library]) -> list[str]:
    return sorted({x.op for x in libraries})


def _one(names: set[str]) -> str:
    described = {name for name in names if cost.described(name)}
    if len(described) != 1:
        came = ", ".join(sorted(names)) or "no records"
        todo = "Name databases of one; `ipex-inductor doctor` lists what is described."
        raise ArgumentError("records of one described GPU", came, todo)
    return described.pop()
