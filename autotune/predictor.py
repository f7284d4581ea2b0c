"""Which template is taken of what nobody measured: only where it won wherever that was held out.

The cost model says what a template takes, a smaller one what the library's kernel takes; a template
is taken if the first is shorter by a margin. Margin, templates and sizes are those of a class of
problems, as records of it justify them (`guess_fitting.py`); of all else this says nothing.
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
_EVEN = 8  # elements of 16 bits: rows that start at multiples of 16 bytes are loaded whole

Measures = tuple[float, float, float, float, float]  # as MEASURES


class Libraries(Value, frozen=True):
    """What the library's kernel takes: logarithms of factors, and of microseconds.

    `ops`: of arithmetic and traffic at the device's peaks, by op; `odd` is added to both where rows
    are of no multiple of 16 bytes. `behind`: of an epilogue, a kernel of its own that moves the
    result twice, the factor of that and its launch.
    """

    ops: dict[str, tuple[float, float]]
    odd: tuple[float, float]
    launch: float
    behind: tuple[float, float]

    def microseconds(self, problem: Problem) -> float | None:
        """Of the op and what follows it; None for other ops."""
        parts, known = library_parts(problem), self.ops.get(problem.op)
        if parts is None or known is None:
            return None
        odd = self.odd if parts.odd else (0.0, 0.0)
        factors = [a + b for a, b in zip(known, odd, strict=True)]
        time = math.exp(cost.larger([*map(math.log, parts.times)], factors, self.launch))
        factor, launch = map(math.exp, self.behind)
        return time + (factor * parts.behind + launch if parts.behind else 0.0)


class LibraryParts(msgspec.Struct, frozen=True):
    """Arithmetic and traffic, and what an epilogue moves, in microseconds at the device's peaks."""

    times: tuple[float, float]
    behind: float
    odd: bool


class Class(Value, frozen=True):
    """Problems of one op, with an epilogue or without; `templates` may be taken for them.

    If there are none, `reason` says why. `low` and `high` are in the order of MEASURES; `epilogues`
    are the ops of those that were measured, `layouts` those of the operands.
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
        """What sets the problem apart from all that were measured; None for nothing."""
        found = measures(problem)
        if self.reason or found is None:
            return self.reason or "its sizes vary"
        if problem.settings or problem.constants:
            return "measured were the usual settings and arguments"
        for name, value, low, high in zip(MEASURES, found, self.low, self.high, strict=True):
            if not low <= value <= high:
                return f"{value:.4g} {name}, known from {low:.4g} to {high:.4g}"
        others = [op for op in epilogue_ops(problem) if op not in self.epilogues]
        if others:
            return f"no epilogue with {others[0]} was measured"
        if layouts(problem) not in self.layouts:
            return "no operands laid out like that were measured"
        return None


@dataclass(frozen=True)
class Guess:
    """The likeliest template and what it and the library's kernel would take, in microseconds."""

    template: Choice
    microseconds: float
    library: float
    margin: float  # how many times as fast it must seem

    @property
    def wins(self) -> bool:
        """Whether the template is to be taken."""
        return self.library >= self.margin * self.microseconds


class Guesser(Value, frozen=True):
    """The two models of one architecture, of measurements alone, and the classes of problems."""

    model: Model
    libraries: Libraries
    classes: tuple[Class, ...]

    def guess(self, problem: Problem, choices: Iterable[Choice]) -> Guess | str:
        """The likeliest of `choices` and whether it wins; or why nothing is said."""
        each = self.of(problem)
        reason = self._why_not(problem) or (each and each.why_not(problem))
        if each is None or reason:
            return reason or "no such op was measured"
        may = {*map(encode, each.templates)}
        offered = {encode(c): c for c in choices}
        said = ((self.model.microseconds(problem, offered[k]), k) for k in offered if k in may)
        times = [(time, key) for time, key in said if time is not None]
        library = self.libraries.microseconds(problem)
        if not times or library is None:
            return "none of the templates it knows is offered"
        time, key = min(times)
        return Guess(offered[key], time, library, each.margin)

    def of(self, problem: Problem) -> Class | None:
        """Its class."""
        kind = kind_of(problem)
        return next((c for c in self.classes if (c.op, c.behind) == kind), None)

    def ops(self) -> set[str]:
        """Those of which a template may be taken."""
        return {each.op for each in self.classes if each.templates}

    def _why_not(self, problem: Problem) -> str | None:
        dtypes = {o.dtype for o in problem.operands}
        known = problem.arch == self.model.arch and len(dtypes) == 1
        return None if known and dtypes <= {*self.model.dtypes} else "other dtypes were measured"


def load(folders: Sequence[Path], arch: str) -> Guesser | None:
    """That of `arch` in the first of `folders` that has one that can be read."""
    for folder in folders:
        try:
            found = msgspec.json.decode((folder / file_name(arch)).read_bytes(), type=Guesser)
        except (OSError, ValueError):
            continue
        if found.model.arch == arch and _fits(found):
            return found
    return None


def file_name(arch: str) -> str:
    """Of the file."""
    return f"guess-{arch.replace(':', '-')}.json"


def library_parts(problem: Problem) -> LibraryParts | None:
    """What is seen of a problem to say what the library takes; None for what is no product."""
    device, size = cost.described(problem.arch), extent(problem)
    fast = device and device.rate(cost.RATES.get(problem.operands[0].dtype, ""))
    if device is None or size is None or not fast or not size.result * size.terms:
        return None
    arithmetic = 2e6 * size.result * size.terms / fast
    moved = 1e6 / (device.bandwidth or 1.0)  # microseconds a byte
    behind = 2 * size.result * WIDTH * moved if problem.epilogue else 0.0
    odd = any(n % _EVEN for n in (size.columns, size.terms))
    return LibraryParts((arithmetic, cost.moved(problem, size) * moved), behind, odd)


def kind_of(problem: Problem) -> tuple[str, bool]:
    """What its class is known by."""
    return problem.op, bool(problem.epilogue)


def measures(problem: Problem) -> Measures | None:
    """As MEASURES; None if its sizes vary or it is no product."""
    size, dense = extent(problem), intensity(problem)
    if size is None or dense is None:
        return None
    return (size.count, size.rows, size.columns, size.terms, dense)


def shared_sizes(problem: Problem) -> set[tuple[int, int]]:
    """What other problems of its family have as well: sizes, and of how many products they are."""
    size = extent(problem)
    if size is None:
        return set()
    if size.count > 1:
        return {(size.count, max(size.rows, size.columns, size.terms))}
    return {(1, size.columns), (1, size.terms)}


def epilogue_ops(problem: Problem) -> tuple[str, ...]:
    """The names of what follows the op."""
    return tuple(sorted({*_CALL.findall(problem.epilogue)}))


def layouts(problem: Problem) -> tuple[str, ...]:
    """Of each operand: its dimensions as they lie in memory, and whether there are gaps."""
    return tuple(map(_layout, problem.operands))


def _layout(operand: Operand) -> str:
    """`01` for rows one after the other, `10` transposed, `01+` for either with gaps."""
    steps = [(n, int(m)) for n, m in zip(operand.stride, operand.shape, strict=True)]
    order = sorted(range(len(steps)), key=lambda i: (-int(steps[i][0]), i))
    whole, gaps = 1, ""
    for i in reversed(order):
        step, size = steps[i]
        gaps = gaps if step == whole or size == 1 else "+"
        whole *= size
    return "".join(map(str, order)) + gaps


def _fits(found: Guesser) -> bool:
    """Whether the numbers are as many as this version has, and can be meant."""
    numbers = [*found.libraries.odd, *found.libraries.behind, found.libraries.launch]
    numbers += [x for pair in found.libraries.ops.values() for x in pair]
    margins = (each.margin for each in found.classes)
    return (
        cost.fits(found.model)
        and all(abs(n) <= LARGEST for n in numbers)
        and all(1 <= margin < math.inf for margin in margins)
    )
