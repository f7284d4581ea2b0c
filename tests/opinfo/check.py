"""Check cases: compile their samples together, run them, and hold them to eager.

Plain Inductor is compiled only where backend ipex differs from eager, so that most cases need one
compilation, and cases that agree share one graph.
"""

import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils._pytree import tree_leaves

from ipex_inductor.reporting import decisions
from opinfo import cases
from opinfo.cases import Case, Sample, Together

OPTIONS = {
    "fallback_random": True,  # random numbers are eager's, so results are comparable
    "cpp_cache_precompile_headers": True,  # for C++ that calls its kernels: half of g++'s time
}
# Fused code rounds elsewhere than eager: twice eager's own error is allowed where the exact result
# is known, as in other tests of ours, and a rounding or two in the dtype where a kernel of eager's
# happens to be exact.
FACTOR, ROUNDINGS = 2, 2
# Dynamo takes some errors for graph breaks, such as a value that a graph depends on. Then it runs
# all of a group in eager, which no comparison shows.
LEFT = "Dynamo leaves it to eager"
compiles = True  # else graphs run as they stand, and what is Inductor's is not judged


@dataclass
class Outcome:
    """What one sample left behind, by name: results, gradients, and what it wrote in place."""

    values: dict[str, Any] = field(default_factory=dict)


@dataclass
class Row:
    """The verdict on one case.

    `status`: pass; ours (only backend ipex is wrong); both (plain Inductor is too); together (only
    backend ipex is wrong in a graph with other cases, and right by itself); skip (eager has no such
    sample, or Dynamo leaves it to eager, with plain Inductor too); crash (the process died).
    """

    case: str
    status: str
    reason: str = ""
    fired: list[str] = field(default_factory=list)


def check(group: Sequence[Case]) -> list[Row]:
    """Return a row a case. What is wrong in a group is compiled again by itself."""
    runnable = {case: _runnable(case) for case in group}
    rows = [Row(str(case), "skip", reason) for case, (_, reason) in runnable.items() if reason]
    todo = {case: numbers for case, (numbers, reason) in runnable.items() if not reason}
    return rows + (_judge(todo) if todo else [])


def _judge(todo: dict[Case, list[int]]) -> list[Row]:
    if len(todo) == 1:
        ((case, numbers),) = todo.items()
        return [_judge_alone(case, numbers)]
    found = _compiled_and_compared(todo, "ipex")
    if found.error:
        half = len(todo) // 2
        parts = dict([*todo.items()][:half]), dict([*todo.items()][half:])
        return [row for part in parts for row in _judge(part)]
    rows = {case: Row(str(case), "pass", "", found.fired) for case in todo}
    plain = None
    for case, wrong in found.wrong.items():
        row = rows[case] = _judge_alone(case, todo[case])
        if row.status == "pass":
            plain = plain or _compiled_and_compared(todo, "inductor")
            row.status = "both" if plain.error or case in plain.wrong else "together"
            row.reason = f"wrong in a graph with others alone: {wrong}"
    return [*rows.values()]


def _judge_alone(case: Case, numbers: list[int]) -> Row:
    found = _compiled_and_compared({case: numbers}, "ipex")
    if not found.said:
        return Row(str(case), "pass", "", found.fired)
    if len(numbers) > 1 and found.error:  # of one sample, and the others are checked all the same
        apart = [_judge_alone(case, [number]) for number in numbers]
        return min(apart, key=lambda row: {"pass": 1, "skip": 2}.get(row.status, 0))
    plain = _compiled_and_compared({case: numbers}, "inductor")
    if found.error == plain.error == LEFT:
        return Row(str(case), "skip", LEFT)
    reason = f"{found.said} | Inductor: {plain.said}" if plain.said else found.said
    return Row(str(case), "both" if plain.said else "ours", reason, found.fired)


def _runnable(case: Case) -> tuple[list[int], str]:
    """Return the numbers of samples that eager can run, or why there are none."""
    try:
        built = cases.samples(case)
    except Exception as error:
        return [], f"torch makes no samples: {_said(error)}"
    numbers, reason = [], "torch has no samples of this way"
    for number, sample in enumerate(built):
        try:
            _outcomes([sample], case.way == "training", None)
            numbers.append(number)
        except Exception as error:
            reason = f"eager: {_said(error)}"
    return numbers, "" if numbers else reason


@dataclass
class Found:
    """What a compilation came to: an error, or the first difference of each case that has one."""

    error: str = ""
    wrong: dict[Case, str] = field(default_factory=dict)
    fired: list[str] = field(default_factory=list)

    @property
    def said(self) -> str:
        """What is wrong of one case; empty if nothing is."""
        return self.error or "".join(self.wrong.values())


def _compiled_and_compared(todo: dict[Case, list[int]], backend: str) -> Found:
    torch.compiler.reset()
    decisions.clear()
    counters.clear()
    wanted = _run(todo, None)
    try:
        # Where a graph breaks, each line that is left is a frame.
        with torch._dynamo.config.patch(recompile_limit=8 * len(todo) * cases.SAMPLES):
            got = _run(todo, backend)
    except Exception as error:
        return Found(f"raises {_said(error)}")
    if any("Backend compiler exception" in reason for reason in counters["unimplemented"]):
        return Found(LEFT)
    fired = sorted({e.subject for r in decisions.reports() for e in r.events if e.kind == "fired"})
    found = Found(fired=fired)
    places = iter(zip(got, wanted, strict=True))
    for case, numbers in todo.items():
        pairs = [next(places) for _ in numbers]
        wrong = next(iter(_wrong(case, pairs)), None)
        if wrong:
            exact = _run_wide(case, numbers)
            wrong = next(iter(_wrong(case, pairs, exact)), None)
        if wrong:
            found.wrong[case] = wrong
    return found


def _wrong(
    case: Case, pairs: list[tuple[Outcome, Outcome]], exact: list[Outcome] | None = None
) -> Iterable[str]:
    """Yield what differs in the samples of a case."""
    tolerances = cases.tolerances(case)
    for number, (ours, eager) in enumerate(pairs):
        yield from _compare(ours, eager, exact[number] if exact else None, tolerances)


def _run_wide(case: Case, numbers: list[int]) -> list[Outcome] | None:
    try:
        return _run({case: numbers}, None, wide=True)
    except Exception:
        return None  # there is no such kernel in float64: eager alone is the yardstick


def _run(todo: dict[Case, list[int]], backend: Any, wide: bool = False) -> list[Outcome]:
    """Build the samples anew and run them, compiled unless `backend` is None."""
    built = {case: cases.samples(case) for case in todo}
    samples = [built[case][number] for case, numbers in todo.items() for number in numbers]
    if wide:
        for sample in samples:
            sample.widen()
    return _outcomes(samples, {case.way for case in todo} == {"training"}, backend)


def _outcomes(samples: list[Sample], training: bool, backend: Any) -> list[Outcome]:
    """Run samples as one function; twice in inference, as weights are packed at the first call."""
    together = Together(samples)
    run: Any = together if backend is None else _compiled(together, backend)
    outcomes = [Outcome() for _ in samples]
    with torch.set_grad_enabled(training):
        for turn in range(1 if training else 2):
            torch.manual_seed(turn)
            results = run(*together.inputs)
            for outcome, *parts in zip(
                outcomes, results, together.inputs_of, together.held_of, strict=True
            ):
                named = _named(*parts)
                outcome.values |= {f"{name}, call {turn}": v for name, v in named.items()}
        if training:
            _add_gradients(samples, together, results, outcomes)
    return outcomes


def _compiled(together: Together, backend: Any) -> Any:
    options = OPTIONS if backend == "inductor" else OPTIONS | {"strict": True}
    return torch.compile(together, backend=backend, options=options, dynamic=False)


def _named(result: Any, inputs: list[Tensor], held: dict[str, Tensor]) -> dict[str, Any]:
    named = {f"result {n}": value for n, value in enumerate(tree_leaves(result))}
    strides = {f"strides of {n}": _strides(x) for n, x in named.items() if isinstance(x, Tensor)}
    named |= {f"input {n} afterwards": x for n, x in enumerate(inputs)}
    named |= {f"{name} afterwards": x for name, x in held.items() if not x.requires_grad}
    return cases.clone(named) | strides


def _strides(value: Tensor) -> Any:
    """Return the strides that mean something: of sizes other than one, of what has elements."""
    if value.layout != torch.strided or not value.numel():
        return None
    return [s for n, s in zip(value.shape, value.stride(), strict=True) if n != 1]


def _add_gradients(
    samples: list[Sample], together: Together, results: list[Any], outcomes: list[Outcome]
) -> None:
    """Run the backward of all samples at once, as one compiled graph has to."""
    random = torch.Generator().manual_seed(0)
    leaves: list[tuple[Outcome, str, Tensor]] = []
    ends: list[Tensor] = []
    for number, (sample, outcome) in enumerate(zip(samples, outcomes, strict=True)):
        named = {f"input {n}": x for n, x in enumerate(together.inputs_of[number])}
        named |= together.held_of[number]
        leaves += [(outcome, name, x) for name, x in named.items() if x.requires_grad]
        found = tree_leaves(sample.differentiate(results[number]))
        ends += [end for end in found if isinstance(end, Tensor) and end.requires_grad]
    if not (leaves and ends):
        return
    tangents = [torch.randn(end.shape, generator=random).to(end.dtype) for end in ends]
    wanted = [leaf for _, _, leaf in leaves]
    grads = torch.autograd.grad(ends, wanted, tangents, allow_unused=True)
    for (outcome, name, _), grad in zip(leaves, grads, strict=True):
        outcome.values[f"gradient of {name}"] = cases.clone(grad)


def _compare(
    ours: Outcome,
    eager: Outcome,
    exact: Outcome | None,
    tolerances: tuple[float, float],
) -> Iterable[str]:
    """Yield what differs; with `exact`, only what is also farther off from that than eager is."""
    if ours.values.keys() != eager.values.keys():
        yield f"{sorted(ours.values.keys() ^ eager.values.keys())} on one side only"
        return
    for name, wanted in eager.values.items():
        got = ours.values[name]
        if name.startswith("strides"):
            if compiles and got != wanted:
                yield f"{name} {got}, not {wanted}"
        elif not isinstance(wanted, Tensor):
            if type(got) is not type(wanted) or (got != wanted and got == got):
                yield f"{name}: {got}, not {wanted}"
        else:
            reference = exact.values.get(name) if exact else None
            wrong = _differs(got, wanted, reference, tolerances)
            if wrong:
                yield f"{name}: {wrong}"


def _differs(got: Any, wanted: Tensor, exact: Any, tolerances: tuple[float, float]) -> str:
    if not isinstance(got, Tensor) or (got.dtype, got.shape) != (wanted.dtype, wanted.shape):
        return f"{_described(got)}, not {_described(wanted)}"
    if wanted.is_quantized or wanted.layout != torch.strided:
        got, wanted = got.to_dense(), wanted.to_dense()
    rtol, atol = tolerances
    if not (wanted.is_floating_point() or wanted.is_complex()):
        return "" if torch.equal(got, wanted) else _farthest(got, wanted)
    if torch.allclose(got, wanted, rtol, atol, equal_nan=True):
        return ""
    if isinstance(exact, Tensor) and exact.shape == got.shape:
        rounded = exact.to(wanted.dtype)
        if torch.allclose(got, rounded, rtol, atol, equal_nan=True):
            return ""
        unit = torch.finfo(wanted.dtype).eps * _largest(exact)
        if _error(got, exact) <= FACTOR * _error(wanted, exact) + ROUNDINGS * unit:
            return ""
    return _farthest(got, wanted)


def _error(value: Tensor, exact: Tensor) -> float:
    """Return the largest error, infinite where one is finite and the other is not."""
    finite = exact.isfinite()
    if not torch.equal(value.isfinite(), finite):
        return float("inf")
    errors = (value.to(exact.dtype) - exact)[finite].abs()
    return float(errors.max()) if errors.numel() else 0.0


def _largest(value: Tensor) -> float:
    finite = value[value.isfinite()].abs()
    return float(finite.max()) if finite.numel() else 0.0


def _farthest(got: Tensor, wanted: Tensor) -> str:
    wide = torch.complex128 if wanted.is_complex() else torch.float64
    difference = (got.to(wide) - wanted.to(wide)).abs().nan_to_num(torch.inf).flatten()
    place = int(difference.argmax())
    count = int((got != wanted).sum())
    values = f"{got.flatten()[place].item():.6g}, not {wanted.flatten()[place].item():.6g}"
    return f"{values} ({count} of {got.numel()} elements differ)"


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    return repr(value)


def _said(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {' '.join(lines)[:300]} ({frame.name})"
