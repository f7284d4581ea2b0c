"""Check cases: compile their samples together, run them, and hold them to eager.

Plain Inductor is compiled only where backend ipex differs from eager, so that most cases need one
compilation, and cases that agree share one graph.
"""

import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils._pytree import tree_leaves

from ipex_inductor import decisions
from opinfo import cases
from opinfo.cases import Case, Sample

OPTIONS = {"fallback_random": True}  # random numbers are eager's, so results are comparable
# Fused code rounds elsewhere than eager: twice eager's own error is allowed where the exact result
# is known, as in other tests of ours.
FACTOR = 2
keeps_strides = True


@dataclass
class Outcome:
    """What one sample left behind, by name: results, gradients, and what it wrote in place."""

    values: dict[str, Any] = field(default_factory=dict)


@dataclass
class Row:
    """The verdict on one case.

    `status`: pass; ours (only backend ipex is wrong); both (plain Inductor is too); skip (eager has
    no such sample); crash (the process died).
    """

    case: str
    status: str
    reason: str = ""
    fired: list[str] = field(default_factory=list)


class Together(nn.Module):
    """Calls of several samples as one graph."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        super().__init__()
        self.calls = nn.ModuleList(sample.call for sample in samples)

    def forward(self, inputs: list[list[Tensor]]) -> list[Any]:
        return [call(*given) for call, given in zip(self.calls, inputs, strict=True)]


def check(group: Sequence[Case]) -> list[Row]:
    """Return a row a case; a group that differs or fails as one is checked case by case."""
    runnable = {case: _runnable(case) for case in group}
    rows = [Row(str(case), "skip", reason) for case, (_, reason) in runnable.items() if reason]
    todo = {case: numbers for case, (numbers, reason) in runnable.items() if not reason}
    if not todo:
        return rows
    wrong, fired = _differences(todo, "ipex")
    if len(todo) > 1 and wrong:
        return rows + [row for case in todo for row in check([case])]
    if not wrong:
        return rows + [Row(str(case), "pass", "", fired) for case in todo]
    ((case, numbers),) = todo.items()
    plain, _ = _differences(todo, "inductor")
    status = "both" if plain else "ours"
    reason = _alone(case, numbers) or wrong
    return [*rows, Row(str(case), status, reason + (f" | Inductor: {plain}" if plain else ""), fired)]


def _alone(case: Case, numbers: list[int]) -> str:
    """Return what is wrong with the first sample that is wrong by itself."""
    if len(numbers) == 1:
        return ""
    for number in numbers:
        wrong, _ = _differences({case: [number]}, "ipex")
        if wrong:
            return wrong
    return ""


def _runnable(case: Case) -> tuple[list[int], str]:
    """Return the numbers of samples that eager can run, or why there are none."""
    try:
        count = len(cases.samples(case))
    except Exception as error:
        return [], f"torch makes no samples: {_said(error)}"
    numbers, reason = [], "torch has no samples of this way"
    for number in range(count):
        try:
            _run({case: [number]}, None)
            numbers.append(number)
        except Exception as error:
            reason = f"eager: {_said(error)}"
    return numbers, "" if numbers else reason


def _differences(todo: dict[Case, list[int]], backend: Any) -> tuple[str, list[str]]:
    """Compile and compare; return the first difference or error, and the rules that fired."""
    torch.compiler.reset()
    decisions.clear()
    counters.clear()
    wanted = _run(todo, None)
    try:
        got = _run(todo, backend)
    except Exception as error:
        return f"raises {_said(error)}", []
    fired = sorted({e.subject for r in decisions.reports() for e in r.events if e.kind == "fired"})
    wide: list[Outcome] | None = None
    for place, (case, ours, eager) in enumerate(zip(_spread(todo), got, wanted, strict=True)):
        tolerances = cases.tolerances(case)
        wrong = list(_compare(ours, eager, None, tolerances))
        if wrong:
            wide = wide or _run_wide(todo)
            exact = wide[place] if wide else None
            wrong = list(_compare(ours, eager, exact, tolerances))
        if wrong:
            return f"{case}: {wrong[0]}", fired
    return "", fired


def _spread(todo: dict[Case, list[int]]) -> Iterable[Case]:
    return (case for case, numbers in todo.items() for _ in numbers)


def _run_wide(todo: dict[Case, list[int]]) -> list[Outcome] | None:
    try:
        return _run(todo, None, wide=True)
    except Exception:
        return None  # there is no such kernel in float64: eager alone is the yardstick


def _run(todo: dict[Case, list[int]], backend: Any, wide: bool = False) -> list[Outcome]:
    """Run samples as one function, compiled unless `backend` is None; twice in inference."""
    ways = {case.way for case in todo}
    training = ways == {"training"}
    if len(ways) > 1 and "training" in ways:
        raise ValueError("training and inference are compiled apart")
    built = {case: cases.samples(case) for case in todo}
    samples = [built[case][number] for case, numbers in todo.items() for number in numbers]
    if wide:
        for sample in samples:
            sample.call.widen()
    together = Together(samples)
    run: Any = together if backend is None else _compiled(together, backend)
    inputs = [list(sample.call.inputs) for sample in samples]
    with torch.set_grad_enabled(training):
        outcomes = [Outcome() for _ in samples]
        for turn in range(1 if training else 2):
            torch.manual_seed(turn)
            results = run(inputs)
            for sample, outcome, given, result in zip(samples, outcomes, inputs, results, strict=True):
                named = _named(sample, given, result)
                outcome.values |= {f"{name}, call {turn}": v for name, v in named.items()}
        if training:
            _add_gradients(samples, inputs, results, outcomes)
    return outcomes


def _compiled(together: Together, backend: Any) -> Any:
    if backend == "inductor":
        return torch.compile(together, backend="inductor", options=OPTIONS, dynamic=False)
    options = OPTIONS | {"strict": True}
    return torch.compile(together, backend=backend, options=options, dynamic=False)


def _named(sample: Sample, inputs: list[Tensor], result: Any) -> dict[str, Any]:
    named = {f"result {n}": value for n, value in enumerate(tree_leaves(result))}
    named |= {f"input {n} afterwards": x for n, x in enumerate(inputs)}
    named |= {f"buffer {name} afterwards": x for name, x in sample.call.named_buffers()}
    return cases.clone(named) | {
        f"strides of {name}": _strides(value)
        for name, value in named.items()
        if name.startswith("result") and isinstance(value, Tensor)
    }


def _strides(value: Tensor) -> Any:
    """Return the strides that mean something: of sizes other than one, of what has elements."""
    if value.layout != torch.strided or not value.numel():
        return None
    return [s for n, s in zip(value.shape, value.stride(), strict=True) if n != 1]


def _add_gradients(
    samples: list[Sample], inputs: list[list[Tensor]], results: list[Any], outcomes: list[Outcome]
) -> None:
    """Run the backward of all samples at once, as one compiled graph has to."""
    random = torch.Generator().manual_seed(0)
    leaves: list[tuple[Outcome, str, Tensor]] = []
    ends: list[Tensor] = []
    for sample, given, result, outcome in zip(samples, inputs, results, outcomes, strict=True):
        named = [(f"input {n}", x) for n, x in enumerate(given)] + [*sample.call.named_parameters()]
        leaves += [(outcome, name, x) for name, x in named if x.requires_grad]
        found = tree_leaves(sample.differentiate(result))
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
            if keeps_strides and got != wanted:
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
        if _error(got, exact) <= FACTOR * _error(wanted, exact):
            return ""
    return _farthest(got, wanted)


def _error(value: Tensor, exact: Tensor) -> float:
    """Return the largest error, infinite where one is finite and the other is not."""
    finite = exact.isfinite()
    if not torch.equal(value.isfinite(), finite):
        return float("inf")
    errors = (value.to(exact.dtype) - exact)[finite].abs()
    return float(errors.max()) if errors.numel() else 0.0


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
