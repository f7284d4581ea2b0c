"""How much arithmetic a problem asks for each byte it moves: where it stands below the roof."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ipex_inductor.autotune.record import Operand, Problem

_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "int32": 4}
_BYTES |= {"float8_e4m3fn": 1, "float8_e5m2": 1, "complex64": 8, "complex128": 16}

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Extent:
    """`count` products of a matrix of `rows` by `terms` with one of `terms` by `columns`."""

    count: int
    rows: int
    columns: int
    terms: int

    @property
    def result(self) -> int:
        """Elements of the result."""
        return self.count * self.rows * self.columns


Extents = Callable[[Sequence[Shape], Problem], Extent | None]


def intensity(problem: Problem) -> float | None:
    """Operations a byte of operands and result, each moved once.

    None for what is neither a matrix product nor a convolution, or has sizes by symbols.
    """
    found = extent(problem)
    if found is None or any(o.dtype not in _BYTES for o in problem.operands):
        return None
    moved = found.result * _BYTES[problem.operands[0].dtype]
    for operand in problem.operands:
        moved += math.prod(map(int, operand.shape)) * _BYTES[operand.dtype]
    return 2 * found.result * found.terms / moved if moved else None


def extent(problem: Problem) -> Extent | None:
    """As `intensity`, the matrix product that it is or that a convolution comes to."""
    name = problem.op.removesuffix(".default").rpartition(".")[2]
    shapes = [_numbers(o) for o in problem.operands]
    if name not in _RESULTS or None in shapes:
        return None
    return _RESULTS[name]([shape for shape in shapes if shape is not None], problem)


def _numbers(operand: Operand) -> Shape | None:
    sizes = tuple(size for size in operand.shape if isinstance(size, int))
    return sizes if len(sizes) == len(operand.shape) else None


def _product(first: int) -> Extents:
    """Of the operands, which are factors; those of an epilogue come behind them."""

    def of(shapes: Sequence[Shape], problem: Problem) -> Extent | None:
        left, right = shapes[first : first + 2] if len(shapes) > first + 1 else ((), ())
        if len(left) < 2 or len(right) != len(left) or left[-1] != right[-2]:
            return None
        return Extent(math.prod(left[:-2]), left[-2], right[-1], left[-1])

    return of


def _linear(shapes: Sequence[Shape], problem: Problem) -> Extent | None:
    left, right = shapes[:2] if len(shapes) > 1 else ((), ())
    if not left or len(right) != 2 or left[-1] != right[-1]:
        return None
    return Extent(1, math.prod(left[:-1]), right[0], left[-1])


def _convolution(shapes: Sequence[Shape], problem: Problem) -> Extent | None:
    x, weight = shapes[:2] if len(shapes) > 1 else ((), ())
    kernel, given = weight[2:], problem.constants
    windows = [given.get(name) for name in ("stride", "padding", "dilation")]
    known = [window for window in windows if isinstance(window, tuple)]
    if given.get("transposed") or not kernel or [len(w) for w in known] != 3 * [len(kernel)]:
        return None
    if len(x) != len(weight) or 0 in known[0]:
        return None
    places = zip(x[2:], kernel, *known, strict=True)
    size = [(n + 2 * pad - far * (k - 1) - 1) // step + 1 for n, k, step, pad, far in places]
    if min(size) <= 0:
        return None
    groups = given.get("groups", 1)
    if type(groups) is not int or groups < 1:
        return None
    return Extent(groups, x[0] * math.prod(size), weight[0] // groups, math.prod(weight[1:]))


_RESULTS: dict[str, Extents] = {
    **dict.fromkeys(("mm", "bmm", "_int_mm"), _product(0)),
    **dict.fromkeys(("addmm", "baddbmm"), _product(1)),
    "linear": _linear,
    **dict.fromkeys(("convolution", "conv"), _convolution),
}
