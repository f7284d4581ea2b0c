"""Problems of dynamic size, and the exact problems they cover."""

import ast
import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import replace

from ipex_inductor.autotune.record import Problem, Size


def bind_sizes(problem: Problem, sizes: Mapping[str, int]) -> Problem:
    """Return the problem with its symbols replaced by these sizes."""
    operands = tuple(
        replace(o, shape=_numbers(o.shape, sizes), stride=_numbers(o.stride, sizes))
        for o in problem.operands
    )
    return replace(problem, operands=operands, symbols=())


def points(problem: Problem) -> tuple[Problem, ...]:
    """Return the problems at which a dynamic one is measured: mid-range, and all upper ends.

    In the middle, no two symbols have one size, so that tracing there keeps them distinct.
    """
    if not problem.symbols:
        return (problem,)
    middle = {
        s.name: min(s.high, math.isqrt(s.low * s.high) + i) for i, s in enumerate(problem.symbols)
    }
    return bind_sizes(problem, middle), bind_sizes(
        problem, {s.name: s.high for s in problem.symbols}
    )


def holds(varying: Problem, exact: Problem) -> bool:
    """Return True if `exact` is `varying` at sizes within its ranges."""
    equal = (varying.op, varying.epilogue, varying.arch) == (
        exact.op,
        exact.epilogue,
        exact.arch,
    )
    ranks = [[len(o.shape) for o in problem.operands] for problem in (varying, exact)]
    if not equal or exact.symbols or ranks[0] != ranks[1]:
        return False
    pairs = zip(varying.operands, exact.operands, strict=True)
    sizes = itertools.chain(*(zip(v.shape, e.shape, strict=True) for v, e in pairs))
    values = {name: size for name, size in sizes if isinstance(name, str) and isinstance(size, int)}
    ranges = {s.name: range(s.low, s.high + 1) for s in varying.symbols}
    if values.keys() != ranges.keys() or any(n not in ranges[name] for name, n in values.items()):
        return False
    try:
        return bind_sizes(varying, values) == exact
    except (KeyError, SyntaxError, ZeroDivisionError, RecursionError):  # no expression of sizes
        return False


def text(problem: Problem) -> str:
    """Return the ranges of a problem as text."""
    return ", ".join(f"{s.low}..{s.high}" for s in problem.symbols)


def width(problem: Problem) -> tuple[int, float]:
    """Return how wide the ranges are: the number of symbols and the product of their ratios."""
    return len(problem.symbols), math.prod(s.high / max(1, s.low) for s in problem.symbols)


def _numbers(sizes: Sequence[Size], symbol_values: Mapping[str, int]) -> tuple[int, ...]:
    """Return the sizes with expressions evaluated."""
    return tuple(n if isinstance(n, int) else number(n, symbol_values) for n in sizes)


_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


def number(text: str, symbol_values: Mapping[str, int]) -> int:
    """Return the value of an expression like `64*s0`; raise `KeyError` for any other text."""

    def value(node: ast.expr) -> int:
        """Return the value of a node."""
        match node:
            case ast.Constant(value=int(number)):
                return number
            case ast.Name(id=name):
                return symbol_values[name]
            case ast.BinOp(left=left, op=op, right=right):
                return _OPERATORS[type(op)](value(left), value(right))
        raise KeyError(text)

    return value(ast.parse(text, mode="eval").body)
