"""How much arithmetic a problem asks for each byte it moves: where it stands below the roof."""

import math
from collections.abc import Callable, Sequence

from ipex_inductor.autotune.record import Operand, Problem

_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "int32": 4}
_BYTES |= {"float8_e4m3fn": 1, "float8_e5m2": 1, "complex64": 8, "complex128": 16}

Shape = tuple[int, ...]


def intensity(problem: Problem) -> float | None:
    """Operations a byte of operands and result, each moved once.

    None for what is neither a matrix product nor a convolution, or has sizes by symbols.
    """
    name = problem.op.removesuffix(".default").rpartition(".")[2]
    if name not in _RESULTS or any(o.dtype not in _BYTES for o in problem.operands):
        return None
    shapes = [_numbers(o) for o in problem.operands]
    if None in shapes:
        return None
    known = [shape for shape in shapes if shape is not None]
    found = _RESULTS[name](known, problem)
    if found is None:
        return None
    result, terms = found
    moved = sum(
        math.prod(s) * _BYTES[o.dtype] for s, o in zip(known, problem.operands, strict=True)
    )
    moved += math.prod(result) * _BYTES[problem.operands[0].dtype]
    return 2 * math.prod(result) * terms / moved if moved else None


def _numbers(operand: Operand) -> Shape | None:
    sizes = tuple(size for size in operand.shape if isinstance(size, int))
    return sizes if len(sizes) == len(operand.shape) else None


def _product(shapes: Sequence[Shape], problem: Problem) -> tuple[Shape, int] | None:
    """The result's shape, and the products summed in each element; a bias comes first."""
    left, right = shapes[-2:] if len(shapes) > 1 else ((), ())
    if len(left) < 2 or len(right) != len(left) or left[-1] != right[-2]:
        return None
    return (*left[:-1], right[-1]), left[-1]


def _linear(shapes: Sequence[Shape], problem: Problem) -> tuple[Shape, int] | None:
    left, right = shapes[:2] if len(shapes) > 1 else ((), ())
    if not left or len(right) != 2 or left[-1] != right[-1]:
        return None
    return (*left[:-1], right[0]), left[-1]


def _convolution(shapes: Sequence[Shape], problem: Problem) -> tuple[Shape, int] | None:
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
    return ((x[0], weight[0], *size), math.prod(weight[1:])) if min(size) > 0 else None


_RESULTS: dict[str, Callable[[Sequence[Shape], Problem], tuple[Shape, int] | None]] = {
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm", "_int_mm"), _product),
    "linear": _linear,
    "convolution": _convolution,
}
