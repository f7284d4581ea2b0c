"""Arithmetic intensity of problems: operations per byte moved, as in the roofline model."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ipex_inductor.autotune.record import Operand, Problem

_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "int32": 4}
_BYTES |= {"float8_e4m3fn": 1, "float8_e5m2": 1, "complex64": 8, "complex128": 16}

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Extent:
    """The size of `count` GEMMs: M is `rows`, N is `columns`, K is `terms`."""

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
    """Return the operations per byte of operands and result, each moved once.

    None for an op that is neither a GEMM nor a convolution, and for dynamic sizes.
    """
    size = extent(problem)
    if size is None or any(o.dtype not in _BYTES for o in problem.operands):
        return None
    moved = size.result * _BYTES[problem.operands[0].dtype]
    for operand in problem.operands:
        moved += math.prod(map(int, operand.shape)) * _BYTES[operand.dtype]
    return 2 * size.result * size.terms / moved if moved else None


def extent(problem: Problem) -> Extent | None:
    """Return the size of the GEMM that the problem is, or that its convolution amounts to.

    None as for `intensity`.
    """
    name = problem.op.removesuffix(".default").rpartition(".")[2]
    shapes = [_numbers(o) for o in problem.operands]
    if name not in _RESULTS or None in shapes:
        return None
    return _RESULTS[name]([shape for shape in shapes if shape is not None], problem)


def _numbers(operand: Operand) -> Shape | None:
    """Return the operand's shape; None if a size is dynamic."""
    sizes = tuple(size for size in operand.shape if isinstance(size, int))
    return sizes if len(sizes) == len(operand.shape) else None


def _product(first: int) -> Extents:
    """Return the function that gives a GEMM's extent; its factors start at operand `first`.

    The operands of an epilogue follow the factors.
    """

    def of(shapes: Sequence[Shape], problem: Problem) -> Extent | None:
        """Return the extent of the GEMM; None if the shapes do not match."""
        lhs, rhs = shapes[first : first + 2] if len(shapes) > first + 1 else ((), ())
        if len(lhs) < 2 or len(rhs) != len(lhs) or lhs[-1] != rhs[-2]:
            return None
        return Extent(math.prod(lhs[:-2]), lhs[-2], rhs[-1], lhs[-1])

    return of


def _linear(shapes: Sequence[Shape], problem: Problem) -> Extent | None:
    """Return the extent of a linear layer; None if the shapes do not match."""
    lhs, rhs = shapes[:2] if len(shapes) > 1 else ((), ())
    if not lhs or len(rhs) != 2 or lhs[-1] != rhs[-1]:
        return None
    return Extent(1, math.prod(lhs[:-1]), rhs[0], lhs[-1])


def _convolution(shapes: Sequence[Shape], problem: Problem) -> Extent | None:
    """Return the extent of the GEMM of a convolution; None if it is not supported."""
    x, weight = shapes[:2] if len(shapes) > 1 else ((), ())
    kernel, constants = weight[2:], problem.constants
    values = [constants.get(name) for name in ("stride", "padding", "dilation")]
    parameters = [value for value in values if isinstance(value, tuple)]
    if (
        constants.get("transposed")
        or not kernel
        or [len(w) for w in parameters] != 3 * [len(kernel)]
    ):
        return None
    if len(x) != len(weight) or 0 in parameters[0]:
        return None
    dimensions = zip(x[2:], kernel, *parameters, strict=True)
    output = [
        (n + 2 * pad - dilation * (k - 1) - 1) // step + 1
        for n, k, step, pad, dilation in dimensions
    ]
    if min(output) <= 0:
        return None
    groups = constants.get("groups", 1)
    if type(groups) is not int or groups < 1:
        return None
    return Extent(groups, x[0] * math.prod(output), weight[0] // groups, math.prod(weight[1:]))


_RESULTS: dict[str, Extents] = {
    **dict.fromkeys(("mm", "bmm", "_int_mm"), _product(0)),
    **dict.fromkeys(("addmm", "baddbmm"), _product(1)),
    "linear": _linear,
    **dict.fromkeys(("convolution", "conv"), _convolution),
}
