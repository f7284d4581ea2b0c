"""Fit the cost model to records, and measure its quality on held-out problems."""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ipex_inductor.autotune import cost
from ipex_inductor.autotune.cost import SHARPNESS, Model
from ipex_inductor.autotune.pool import Pool, pool
from ipex_inductor.autotune.record import Choice, Problem, Record, decode_problem
from ipex_inductor.errors import ArgumentError

FEWEST = 20  # problems of a dtype; a tenth of them is held out at a time
FOLDS = 10
STEPS, ENOUGH = 400, 1e-7  # of L-BFGS: most iterations, least gain of one
RIDGE = 1e-3  # penalty on all factors that depend on the tile's shape
HUBER = 0.3  # relative error above which the loss is linear
WORD = 0.3  # weight of a time that another tool reported
PAIRS = 5  # fewest pairs of such a time and our own to estimate its overhead

# Initial factors: half of the peak rate, two thirds of the bandwidth, 0.4 us a step.
FIRST, FIRST_LAUNCH = (0.5, 0.0, 0.35, -0.9), 0.4


@dataclass(frozen=True)
class Quality:
    """The quality of the model: each problem is predicted by a model fitted on others.

    `error` is the median relative error. `lost` gives, for each number of top-ranked templates, how
    much slower their best is than the best of all templates (mean, worst), as a share.
    """

    error: float
    lost: dict[int, tuple[float, float]]


@dataclass(frozen=True)
class _Rows:
    """Training rows, one a timed template: log times, model inputs, weights and problem numbers."""

    times: Tensor
    parts: Tensor
    features: Tensor
    weights: Tensor
    problems: Tensor

    @property
    def count(self) -> int:
        """The number of problems."""
        return int(self.problems.max()) + 1


def fit(records: Iterable[Record]) -> tuple[Model, Quality]:
    """Return the model of the records' one architecture, and its quality.

    It covers dtypes with 20 problems or more that have templates. Raises `ArgumentError` if there
    are none, for several architectures, and for one without a description.
    """
    pools = pool(records)
    problems = {key: decode_problem(key) for key in pools}
    arch = single_architecture({problem.arch for problem in problems.values()})
    extra = _besides([*pools.values()])
    templates = [
        (problems[key], timed_templates(problems[key], pools[key], extra)) for key in sorted(pools)
    ]
    dtypes = dtypes_of(templates)
    samples = [timed for p, timed in templates if timed and p.operands[0].dtype in dtypes]
    quality = _held_out(_rows(samples))
    return model_of(samples, arch, dtypes, quality.error), quality


Seen = tuple[Choice, float, float, cost.Parts]  # a template, its time in microseconds, its weight


def model_of(
    problems: Sequence[Sequence[Seen]], arch: str, dtypes: tuple[str, ...], error: float
) -> Model:
    """Return the model fitted on the timed templates of each problem."""
    factors, launch = _fit(_rows(problems))
    names = {choice.name for templates in problems for choice, *_ in templates}
    tiles = tuple(tuple(row) for row in factors.tolist())
    return Model(arch, dtypes, tiles, launch, tuple(sorted(names)), error, len(problems))


def dtypes_of(templates: Iterable[tuple[Problem, Sequence[Seen]]]) -> tuple[str, ...]:
    """Return the dtypes with enough problems; raise `ArgumentError` if there are none."""
    counts = Counter(p.operands[0].dtype for p, timed in templates if timed)
    dtypes = tuple(sorted(dtype for dtype, count in counts.items() if count >= FEWEST))
    if not dtypes:
        counted = ", ".join(f"{n} of {dtype}" for dtype, n in sorted(counts.items())) or "none"
        advice = "Record more: ipex-inductor autotune run."
        raise ArgumentError(f"{FEWEST} problems of a dtype with templates", counted, advice)
    return dtypes


def timed_templates(problem: Problem, pooled: Pool, extra: float | None = None) -> list[Seen]:
    """Return the timed templates of a problem; with `extra`, including other tools' times.

    `extra` is the overhead in microseconds that is subtracted from other tools' times.
    """
    measured = pooled.estimates()
    times = [(e.choice, e.p50, 1.0) for e in measured.values()]
    if extra is not None:
        reported = (e for key, e in pooled.reported_estimates().items() if key not in measured)
        times += [(e.choice, max(e.p50 - extra, 0.3 * e.p50), WORD) for e in reported]
    candidates = ((c, t, w, cost.parts_of(problem, c)) for c, t, w in times if c.kind == "template")
    return [(c, t, w, parts) for c, t, w, parts in candidates if parts is not None]


def _rows(problems: Sequence[Sequence[Seen]]) -> _Rows:
    """Return the training rows of the timed templates of each problem."""
    flat = [(i, *row) for i, templates in enumerate(problems) for row in templates]
    return _Rows(
        tensor([math.log(time) for _, _, time, _, _ in flat]),
        tensor([parts.times for *_, parts in flat]).log(),
        tensor([parts.features for *_, parts in flat]),
        tensor([weight for _, _, _, weight, _ in flat]),
        torch.tensor([i for i, *_ in flat]),
    )


def _besides(pools: Sequence[Pool]) -> float | None:
    """Return the overhead in other tools' times, in microseconds: mostly a launch.

    It is the median difference to our own times of the same choices; None for fewer than `PAIRS`.
    """
    pairs = [
        report.p50 - measured[key].p50
        for pooled in pools
        for measured in [pooled.estimates()]
        for key, report in pooled.reported_estimates().items()
        if key in measured
    ]
    return statistics.median(pairs) if len(pairs) >= PAIRS else None


def _fit(rows: _Rows, mask: Tensor | None = None) -> tuple[Tensor, float]:
    """Return the factors and the launch time fitted on the rows in `mask`; None means all rows."""
    mask = torch.ones_like(rows.problems, dtype=torch.bool) if mask is None else mask
    factors = torch.zeros(4, rows.features.shape[1], dtype=torch.float64)
    factors[:, 0] = tensor(FIRST)
    launch = tensor([FIRST_LAUNCH])

    def loss() -> Tensor:
        times = _predict_times(rows, mask, factors, launch)
        errors = functional.huber_loss(times, rows.times[mask], reduction="none", delta=HUBER)
        return (rows.weights[mask] * errors).mean() + RIDGE * factors[:, 1:].square().sum()

    minimize(loss, [factors, launch])
    return factors, float(launch)


def minimize(loss: Callable[[], Tensor], parameters: Sequence[Tensor]) -> None:
    """Change `parameters` in place to minimize `loss`, which reads them."""
    optimizer = torch.optim.LBFGS(
        [parameter.requires_grad_() for parameter in parameters],
        max_iter=STEPS,
        tolerance_change=ENOUGH,
        line_search_fn="strong_wolfe",
    )

    def step() -> float:
        optimizer.zero_grad()
        value = loss()
        value.backward()  # type: ignore[no-untyped-call]
        return float(value.detach())

    optimizer.step(step)  # type: ignore[no-untyped-call]
    for parameter in parameters:
        parameter.requires_grad_(False)


def _held_out(rows: _Rows) -> Quality:
    """Return the quality by cross-validation: each fold is predicted by a fit on the others."""
    fold = torch.arange(rows.count) % FOLDS
    predicted = torch.zeros_like(rows.times)
    for number in range(FOLDS):
        held_out = fold[rows.problems] == number
        factors, launch = _fit(rows, ~held_out)
        predicted[held_out] = _predict_times(rows, held_out, factors, tensor([launch]))
    ranked = []
    for i in range(rows.count):
        mine = rows.problems == i
        ranked.append(sorted(zip(predicted[mine].tolist(), rows.times[mine].tolist(), strict=True)))
    lost = {}
    for first in (1, 5, 8, 12):
        shares = [min(t for _, t in r[:first]) - min(t for _, t in r) for r in ranked]
        lost[first] = (math.expm1(statistics.fmean(shares)), math.expm1(max(shares)))
    return Quality(math.expm1(float((predicted - rows.times).abs().median())), lost)


def _predict_times(rows: _Rows, mask: Tensor, factors: Tensor, launch: Tensor) -> Tensor:
    """Return the predicted log times of the rows in `mask`."""
    return larger(rows.parts[mask] + rows.features[mask] @ factors.t(), launch)


def larger(times: Tensor, least: Tensor) -> Tensor:
    """Return the smooth maximum of each row, as `cost.larger` does for one."""
    padded = torch.cat([times, least.expand(times.shape[0], 1)], 1)
    return torch.logsumexp(SHARPNESS * padded, 1) / SHARPNESS


def tensor(values: object) -> Tensor:
    """Return `values` as a float64 tensor, the precision of fitting."""
    return torch.tensor(values, dtype=torch.float64)


def single_architecture(names: set[str]) -> str:
    """Return the one architecture; raise `ArgumentError` for several or an unknown one."""
    if len(names) != 1 or not all(map(cost.target_of, names)):
        listed = ", ".join(sorted(names)) or "no records"
        advice = "Name databases of one; `ipex-inductor doctor` lists what is described."
        raise ArgumentError("records of one described GPU", listed, advice)
    return names.pop()
