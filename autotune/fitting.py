"""Fit the cost model to records, and say how good it is on problems that it has not seen."""

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

FEWEST = 20  # problems of a dtype, of which a tenth is held out at a time
FOLDS = 10
STEPS, ENOUGH = 400, 1e-7  # of L-BFGS at most; what it gains by one at least
RIDGE = 1e-3  # on all factors that depend on a tile's shape
HUBER = 0.3  # beyond that relative error what is far off counts linearly
WORD = 0.3  # the weight of a time by another tool's word
PAIRS = 5  # of such a time and our own, or nothing is known of what it has besides the kernel

# The factors before any record: half of the peak rate, two thirds of the bandwidth, 0.4 us a step.
FIRST, FIRST_LAUNCH = (0.5, 0.0, 0.35, -0.9), 0.4


@dataclass(frozen=True)
class Quality:
    """What the model is worth, each problem predicted by a model fitted on others.

    `lost`: by what share the best of so many templates, ranked by the model, is slower than the
    best of all templates (mean, worst).
    """

    error: float
    lost: dict[int, tuple[float, float]]


@dataclass(frozen=True)
class _Rows:
    """Logarithms of the times of templates; what the model sees of each; whose problem's it is."""

    times: Tensor
    parts: Tensor
    features: Tensor
    weights: Tensor
    problems: Tensor

    @property
    def count(self) -> int:
        """Of problems."""
        return int(self.problems.max()) + 1


def fit(records: Iterable[Record]) -> tuple[Model, Quality]:
    """The model of the records' one architecture, and its quality.

    Of dtypes with 20 problems or more that have templates. Raises `ArgumentError` if there are
    none, for several architectures, and for one without a description.
    """
    pools = pool(records)
    problems = {key: decode_problem(key) for key in pools}
    arch = one({problem.arch for problem in problems.values()})
    extra = _besides([*pools.values()])
    templates = [(problems[key], seen(problems[key], pools[key], extra)) for key in sorted(pools)]
    dtypes = dtypes_of(templates)
    kept = [known for p, known in templates if known and p.operands[0].dtype in dtypes]
    quality = _held_out(_rows(kept))
    return model_of(kept, arch, dtypes, quality.error), quality


Seen = tuple[Choice, float, float, cost.Parts]  # of a template: its time and what that counts for


def model_of(
    problems: Sequence[Sequence[Seen]], arch: str, dtypes: tuple[str, ...], error: float
) -> Model:
    """The model of what was seen of each of some problems."""
    factors, launch = _fit(_rows(problems))
    names = {choice.name for templates in problems for choice, *_ in templates}
    tiles = tuple(tuple(row) for row in factors.tolist())
    return Model(arch, dtypes, tiles, launch, tuple(sorted(names)), error, len(problems))


def dtypes_of(templates: Iterable[tuple[Problem, Sequence[Seen]]]) -> tuple[str, ...]:
    """The dtypes of which enough is known. Raises `ArgumentError` if there are none."""
    counts = Counter(p.operands[0].dtype for p, known in templates if known)
    dtypes = tuple(sorted(dtype for dtype, count in counts.items() if count >= FEWEST))
    if not dtypes:
        came = ", ".join(f"{n} of {dtype}" for dtype, n in sorted(counts.items())) or "none"
        todo = "Record more: ipex-inductor autotune run."
        raise ArgumentError(f"{FEWEST} problems of a dtype with templates", came, todo)
    return dtypes


def seen(problem: Problem, pooled: Pool, extra: float | None = None) -> list[Seen]:
    """The templates that were timed; with `extra`, or else those that another tool has timed.

    `extra`: the microseconds that the other's times have besides.
    """
    measured = pooled.estimates()
    times = [(e.choice, e.p50, 1.0) for e in measured.values()]
    if extra is not None:
        told = (e for key, e in pooled.reported().items() if key not in measured)
        times += [(e.choice, max(e.p50 - extra, 0.3 * e.p50), WORD) for e in told]
    found = ((c, t, w, cost.parts_of(problem, c)) for c, t, w in times if c.kind == "template")
    return [(c, t, w, parts) for c, t, w, parts in found if parts is not None]


def _rows(problems: Sequence[Sequence[Seen]]) -> _Rows:
    flat = [(i, *each) for i, templates in enumerate(problems) for each in templates]
    return _Rows(
        tensor([math.log(time) for _, _, time, _, _ in flat]),
        tensor([parts.times for *_, parts in flat]).log(),
        tensor([parts.features for *_, parts in flat]),
        tensor([weight for _, _, _, weight, _ in flat]),
        torch.tensor([i for i, *_ in flat]),
    )


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


def _fit(rows: _Rows, mask: Tensor | None = None) -> tuple[Tensor, float]:
    """The factors, and the launch, of the rows in `mask`."""
    mask = torch.ones_like(rows.problems, dtype=torch.bool) if mask is None else mask
    factors = torch.zeros(4, rows.features.shape[1], dtype=torch.float64)
    factors[:, 0] = tensor(FIRST)
    launch = tensor([FIRST_LAUNCH])

    def loss() -> Tensor:
        found = _predicted(rows, mask, factors, launch)
        off = functional.huber_loss(found, rows.times[mask], reduction="none", delta=HUBER)
        return (rows.weights[mask] * off).mean() + RIDGE * factors[:, 1:].square().sum()

    minimize(loss, [factors, launch])
    return factors, float(launch)


def minimize(loss: Callable[[], Tensor], parameters: Sequence[Tensor]) -> None:
    """Change `parameters` so that `loss`, which reads them, is least."""
    optimizer = torch.optim.LBFGS(
        [parameter.requires_grad_() for parameter in parameters],
        max_iter=STEPS,
        tolerance_change=ENOUGH,
        line_search_fn="strong_wolfe",
    )

    def step() -> float:
        optimizer.zero_grad()
        found = loss()
        found.backward()  # type: ignore[no-untyped-call]
        return float(found.detach())

    optimizer.step(step)  # type: ignore[no-untyped-call]
    for parameter in parameters:
        parameter.requires_grad_(False)


def _held_out(rows: _Rows) -> Quality:
    """Every tenth problem in turns, predicted by what the others teach."""
    fold = torch.arange(rows.count) % FOLDS
    found = torch.zeros_like(rows.times)
    for number in range(FOLDS):
        out = fold[rows.problems] == number
        factors, launch = _fit(rows, ~out)
        found[out] = _predicted(rows, out, factors, tensor([launch]))
    ranked = []
    for i in range(rows.count):
        mine = rows.problems == i
        ranked.append(sorted(zip(found[mine].tolist(), rows.times[mine].tolist(), strict=True)))
    lost = {}
    for first in (1, 5, 8, 12):
        shares = [min(t for _, t in r[:first]) - min(t for _, t in r) for r in ranked]
        lost[first] = (math.expm1(statistics.fmean(shares)), math.expm1(max(shares)))
    return Quality(math.expm1(float((found - rows.times).abs().median())), lost)


def _predicted(rows: _Rows, mask: Tensor, factors: Tensor, launch: Tensor) -> Tensor:
    return larger(rows.parts[mask] + rows.features[mask] @ factors.t(), launch)


def larger(times: Tensor, least: Tensor) -> Tensor:
    """As `cost.larger`, of rows."""
    every = torch.cat([times, least.expand(times.shape[0], 1)], 1)
    return torch.logsumexp(SHARPNESS * every, 1) / SHARPNESS


def tensor(values: object) -> Tensor:
    """In the precision that models are fitted in."""
    return torch.tensor(values, dtype=torch.float64)


def one(names: set[str]) -> str:
    """The one architecture. Raises `ArgumentError` for several, and for one nobody described."""
    if len(names) != 1 or not all(map(cost.described, names)):
        came = ", ".join(sorted(names)) or "no records"
        todo = "Name databases of one; `ipex-inductor doctor` lists what is described."
        raise ArgumentError("records of one described GPU", came, todo)
    return names.pop()
