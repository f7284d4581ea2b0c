"""Predict whether a template beats the library on an unmeasured problem.

The cost model predicts the time of a template, a smaller model that of the library's kernel; the
template is taken if it is faster by a margin. Margin, templates and size limits belong to a class
of problems, and are derived from held-out records (`guess_fitting.py`). Outside the classes there
is no prediction.
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ipex_inductor.autotune import cost
from ipex_inductor.autotune.cost import LARGEST, WIDTH, Model
from ipex_inductor.autotune.intensity import extent, intensity
from ipex_inductor.autotune.record import Choice, Operand, Problem, Value, encode

MEASURES = ("products", "rows", "columns", "terms", "operations a byte")
_CALL = re.compile(r"[\w.]+(?=\()")
_EVEN = 8  # 16-bit elements in 16 bytes, the alignment of vector loads

Measures = tuple[float, float, float, float, float]  # in the order of MEASURES


class Libraries(Value, frozen=True):
    """The times of the library's kernels: logarithms of factors, and of microseconds.

    `ops` has the factors of arithmetic and traffic at the device's peaks, by op. `odd` is added to
    both if rows are no multiple of 16 bytes. `behind` describes an epilogue, a separate kernel that
    moves the result twice: the factor of that, and its launch.
    """

    ops: dict[str, tuple[float, float]]
    odd: tuple[float, float]
    launch: float
    behind: tuple[float, float]

    def microseconds(self, problem: Problem) -> float | None:
        """Return the time of the op and its epilogue in microseconds; None for unknown ops."""
        parts, op_factors = library_parts(problem), self.ops.get(problem.op)
        if parts is None or op_factors is None:
            return None
        odd = self.odd if parts.odd else (0.0, 0.0)
        factors = [a + b for a, b in zip(op_factors, odd, strict=True)]
        time = math.exp(cost.larger([*map(math.log, parts.times)], factors, self.launch))
        factor, launch = map(math.exp, self.behind)
        return time + (factor * parts.behind + launch if parts.behind else 0.0)


class LibraryParts(msgspec.Struct, frozen=True):
    """Times at the device's peaks in microseconds: arithmetic and traffic, and the epilogue's.

    `odd` is true if rows are no multiple of 16 bytes.
    """

    times: tuple[float, float]
    behind: float
    odd: bool


class Class(Value, frozen=True):
    """Problems of one op, with an epilogue or without; `templates` may be taken for them.

    Without templates, `reason` says why. `low` and `high` are limits in the order of MEASURES;
    `epilogues` are the measured epilogue ops, `layouts` the measured layouts of the operands.
    """

    op: str
    behind: bool
    epilogues: tuple[str, ...]
    layouts: tuple[tuple[str, ...], ...]
    low: Measures
    high: Measures
    margin: float = 1.0
    templates: tuple[Choice, ...] = ()
    reason: str = ""

    def why_not(self, problem: Problem) -> str | None:
        """Return the difference from all measured problems; None if the problem is covered."""
        values = measures(problem)
        if self.reason or values is None:
            return self.reason or "its sizes vary"
        if problem.settings or problem.constants:
            return "only the usual settings and arguments were measured"
        for name, value, low, high in zip(MEASURES, values, self.low, self.high, strict=True):
            if not low <= value <= high:
                return f"{value:.4g} {name}, known from {low:.4g} to {high:.4g}"
        unmeasured = [op for op in epilogue_ops(problem) if op not in self.epilogues]
        if unmeasured:
            return f"no epilogue with {unmeasured[0]} was measured"
        if layouts(problem) not in self.layouts:
            return "operands with these strides were not measured"
        return None


@dataclass(frozen=True)
class Guess:
    """The most promising template with its time and the library's, in microseconds."""

    template: Choice
    microseconds: float
    library: float
    margin: float  # ratio by which it must be predicted faster

    @property
    def wins(self) -> bool:
        """True if the template is to be taken."""
        return self.library >= self.margin * self.microseconds


class Guesser(Value, frozen=True):
    """The two models of one architecture and the classes of problems they apply to."""

    model: Model
    libraries: Libraries
    classes: tuple[Class, ...]

    def guess(self, problem: Problem, choices: Iterable[Choice]) -> Guess | str:
        """Return the fastest usable template by prediction, or the reason for no prediction."""
        problem_class = self.of(problem)
        reason = self._why_not(problem) or (problem_class and problem_class.why_not(problem))
        if problem_class is None or reason:
            return reason or "no such op was measured"
        may = {*map(encode, problem_class.templates)}
        offered = {encode(c): c for c in choices}
        predicted = ((self.model.microseconds(problem, offered[k]), k) for k in offered if k in may)
        times = [(time, key) for time, key in predicted if time is not None]
        library = self.libraries.microseconds(problem)
        if not times or library is None:
            return "none of the templates it knows is offered"
        time, key = min(times)
        return Guess(offered[key], time, library, problem_class.margin)

    def of(self, problem: Problem) -> Class | None:
        """Return the problem's class; None without one."""
        kind = kind_of(problem)
        return next((c for c in self.classes if (c.op, c.behind) == kind), None)

    def ops(self) -> set[str]:
        """Return the ops for which a template may be taken."""
        return {problem_class.op for problem_class in self.classes if problem_class.templates}

    def _why_not(self, problem: Problem) -> str | None:
        """Return why the models do not cover the problem; None if they do."""
        dtypes = {o.dtype for o in problem.operands}
        covered = problem.arch == self.model.arch and len(dtypes) == 1
        return None if covered and dtypes <= {*self.model.dtypes} else "other dtypes were measured"


def load(folders: Sequence[Path], arch: str) -> Guesser | None:
    """Return the predictor of `arch` from the first of `folders` with a readable one."""
    for folder in folders:
        try:
            predictor = msgspec.json.decode((folder / file_name(arch)).read_bytes(), type=Guesser)
        except (OSError, ValueError):
            continue
        if predictor.model.arch == arch and _fits(predictor):
            return predictor
    return None


def file_name(arch: str) -> str:
    """Return the file name of the predictor of `arch`."""
    return f"guess-{arch.replace(':', '-')}.json"


def library_parts(problem: Problem) -> LibraryParts | None:
    """Return the inputs of the library's model; None for a problem that is no GEMM."""
    device, size = cost.target_of(problem.arch), extent(problem)
    rate = device and device.rate(cost.RATES.get(problem.operands[0].dtype, ""))
    if device is None or size is None or not rate or not size.result * size.terms:
        return None
    arithmetic = 2e6 * size.result * size.terms / rate
    moved = 1e6 / (device.bandwidth or 1.0)  # microseconds a byte
    epilogue = 2 * size.result * WIDTH * moved if problem.epilogue else 0.0
    odd = any(n % _EVEN for n in (size.columns, size.terms))
    return LibraryParts((arithmetic, cost.bytes_moved(problem, size) * moved), epilogue, odd)


def kind_of(problem: Problem) -> tuple[str, bool]:
    """Return the key of the problem's class: its op, and whether it has an epilogue."""
    return problem.op, bool(problem.epilogue)


def measures(problem: Problem) -> Measures | None:
    """Return the values of MEASURES; None for dynamic sizes or a problem that is no GEMM."""
    size, dense = extent(problem), intensity(problem)
    if size is None or dense is None:
        return None
    return (size.count, size.rows, size.columns, size.terms, dense)


def shared_sizes(problem: Problem) -> set[tuple[int, int]]:
    """Return the sizes that define the problem's family, each with the count of GEMMs."""
    size = extent(problem)
    if size is None:
        return set()
    if size.count > 1:
        return {(size.count, max(size.rows, size.columns, size.terms))}
    return {(1, size.columns), (1, size.terms)}


def epilogue_ops(problem: Problem) -> tuple[str, ...]:
    """Return the names of the ops in the epilogue."""
    return tuple(sorted({*_CALL.findall(problem.epilogue)}))


def layouts(problem: Problem) -> tuple[str, ...]:
    """Return for each operand the order of its dimensions in memory, and `+` for gaps."""
    return tuple(map(_layout, problem.operands))


def _layout(operand: Operand) -> str:
    """Return `01` for row-major, `10` for transposed, and `01+` or `10+` with gaps."""
    steps = [(n, int(m)) for n, m in zip(operand.stride, operand.shape, strict=True)]
    order = sorted(range(len(steps)), key=lambda i: (-int(steps[i][0]), i))
    whole, gaps = 1, ""
    for i in reversed(order):
        step, size = steps[i]
        gaps = gaps if step == whole or size == 1 else "+"
        whole *= size
    return "".join(map(str, order)) + gaps


def _fits(predictor: Guesser) -> bool:
    """Return True if the predictor has this version's counts, and plausible values."""
    numbers = [*predictor.libraries.odd, *predictor.libraries.behind, predictor.libraries.launch]
    numbers += [x for pair in predictor.libraries.ops.values() for x in pair]
    margins = (problem_class.margin for problem_class in predictor.classes)
    return (
        cost.fits(predictor.model)
        and all(abs(n) <= LARGEST for n in numbers)
        and all(1 <= margin < math.inf for margin in margins)
    )
