"""Problems whose sizes vary, and those of one size each: which says what of the other."""

import ast
import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import replace

from ipex_inductor.autotune.record import Problem, Size


def sized(problem: Problem, sizes: Mapping[str, int]) -> Problem:
    """The problem with these sizes for its symbols."""
    operands = tuple(
        replace(o, shape=_numbers(o.shape, sizes), stride=_numbers(o.stride, sizes))
        for o in problem.operands
    )
    return replace(problem, operands=operands, symbols=())


def points(problem: Problem) -> tuple[Problem, ...]:
    """The sizes at which it is measured: in the middle of every range, and at its end.

    In the middle no two symbols are alike, so that what is traced there keeps them apart.
    """
    if not problem.symbols:
        return (problem,)
    middle = {
        s.name: min(s.high, math.isqrt(s.low * s.high) + i) for i, s in enumerate(problem.symbols)
    }
    return sized(problem, middle), sized(problem, {s.name: s.high for s in problem.symbols})


def holds(varying: Problem, exact: Problem) -> bool:
    """Whether `exact` is `varying` at sizes in its ranges."""
    alike = (varying.op, varying.epilogue, varying.arch) == (exact.op, exact.epilogue, exact.arch)
    ranks = [[len(o.shape) for o in problem.operands] for problem in (varying, exact)]
    if not alike or exact.symbols or ranks[0] != ranks[1]:
        return False
    pairs = zip(varying.operands, exact.operands, strict=True)
    sizes = itertools.chain(*(zip(v.shape, e.shape, strict=True) for v, e in pairs))
    found = {name: size for name, size in sizes if isinstance(name, str) and isinstance(size, int)}
    ranges = {s.name: range(s.low, s.high + 1) for s in varying.symbols}
    if found.keys() != ranges.keys() or any(n not in ranges[name] for name, n in found.items()):
        return False
    try:
        return sized(varying, found) == exact
    except (KeyError, SyntaxError, ZeroDivisionError, RecursionError):  # no expression of sizes
        return False


def text(problem: Problem) -> str:
    """Its ranges, as they are shown."""
    return ", ".join(f"{s.low}..{s.high}" for s in problem.symbols)


def width(problem: Problem) -> tuple[int, float]:
    """How much it leaves open: how many sizes, and how far they go."""
    return len(problem.symbols), math.prod(s.high / max(1, s.low) for s in problem.symbols)


def _numbers(sizes: Sequence[Size], known: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(n if isinstance(n, int) else number(n, known) for n in sizes)


_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


def number(text: str, known: Mapping[str, int]) -> int:
    """The value of an expression like `64*s0`. Raises `KeyError` for what is none."""

    def value(node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int(number)):
                return number
            case ast.Name(id=name):
                return known[name]
            case ast.BinOp(left=left, op=op, right=right):
                return _OPERATORS[type(op)](value(left), value(right))
        raise KeyError(text)

    return value(ast.parse(text, mode="eval").body)
