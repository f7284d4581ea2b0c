"""Read a graph of elementwise ops: the terms that its tensors hold, over what they held before.

In-place ops, `_foreach_` ops and aliases are followed; anything else raises `UnreadError`.
"""

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node


class UnreadError(Exception):  # not a failure: the graph is compiled in another way
    """Raised with the reason why a graph is not read."""


FOLDED: dict[str, Callable[..., Any]] = {  # C++ would divide ints as ints
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "neg": operator.neg,
    "sqrt": math.sqrt,
    "pow": math.pow,
}


class Term:
    """An operation on terms, a `leaf` (an operand of the graph as it was) or a `const`.

    Equal terms of one `Terms` are one object; `serial` is higher than those of its arguments.
    """

    __slots__ = ("args", "op", "serial", "terms")

    def __init__(self, op: str, args: tuple[Any, ...], serial: int) -> None:
        self.op = op
        self.args = args
        self.serial = serial
        self.terms: tuple[Term, ...] = () if op in ("leaf", "const") else args


class Terms:
    """A table of terms, in which equal terms are one object."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], Term] = {}

    def make(self, op: str, *args: Any) -> Term:
        """Return the term of an operation, folded if it is on constants. Raises `UnreadError`."""
        if op in FOLDED and all(a.op == "const" for a in args):
            try:
                return self.constant(float(FOLDED[op](*(a.args[0] for a in args))))
            except (ArithmeticError, ValueError) as error:
                raise UnreadError(f"a constant that cannot be computed: {error}") from error
        return self._known.setdefault((op, *args), Term(op, args, len(self._known)))

    def constant(self, value: float) -> Term:
        """Return the term of a Python number; 1 and 1.0 are two terms."""
        key = ("const", type(value), value.hex() if isinstance(value, float) else value)
        return self._known.setdefault(key, Term("const", (value,), len(self._known)))


@dataclass(eq=False)
class Cell:
    """The memory of a tensor.

    `origin` is the node that the tensor came from, and its index in the list. `stored` is the op
    that rounds to its dtype, where kernels compute in a wider one and the rounded value may be
    seen.
    """

    term: Term
    shape: tuple[int, ...]
    origin: tuple[Node, int | None]
    stored: str = ""
    last: int = -1  # the number of the last write
    operand: int | None = None  # the operand that it becomes when it is returned

    @property
    def single(self) -> bool:
        """True if the tensor has one element."""
        return all(n == 1 for n in self.shape)


# Functions from terms to terms. Arguments that a signature here lacks are refused, such as
# `add(a, -0.1, b)`, which torch once had.


def _add(terms: Terms, a: Term, b: Term, *, alpha: Term | None = None) -> Term:
    added = _scale(terms, b, alpha)
    if a.op == added.op == "div" and a.args[1].op == "mul" and a.args[1].args[1] is added.args[1]:
        # x / (y r) + z / r, as in Adam with the rate in r. At a rate of 0 it is NaN where x is 0;
        # (x / y + z) / r, which eager steps compute, is not.
        top = terms.make("add", terms.make("div", a.args[0], a.args[1].args[0]), added.args[0])
        return terms.make("div", top, added.args[1])
    return terms.make("add", a, added)


def _mul(terms: Terms, a: Term, b: Term) -> Term:
    """Return the product; a reciprocal times a number becomes a quotient.

    The two are an ulp apart, and the quotient is finite for subnormals.
    """
    if a.op == "div" and a.args[0] is terms.constant(1) and b.op == "const":
        return terms.make("div", b, a.args[1])  # as `b / a` becomes under a torch function mode
    return terms.make("mul", a, b)


def _rsub(terms: Terms, a: Term, b: Term, *, alpha: Term | None = None) -> Term:
    return _sub(terms, b, a, alpha=alpha)


def _sub(terms: Terms, a: Term, b: Term, *, alpha: Term | None = None) -> Term:
    return terms.make("sub", a, _scale(terms, b, alpha))


def _scale(terms: Terms, b: Term, by: Term | None) -> Term:
    one = by is None or (by.op == "const" and by.args[0] == 1)
    return b if one else terms.make("mul", by, b)


def _addcmul(terms: Terms, a: Term, b: Term, c: Term, value: Term | None = None) -> Term:
    return terms.make("add", a, _scale(terms, terms.make("mul", b, c), value))


def _addcdiv(terms: Terms, a: Term, b: Term, c: Term, value: Term | None = None) -> Term:
    return terms.make("add", a, _scale(terms, terms.make("div", b, c), value))


def _pow(terms: Terms, a: Term, b: Term) -> Term:
    if b.op == "const" and b.args[0] in (1, 2):
        return a if b.args[0] == 1 else terms.make("mul", a, a)
    return terms.make("pow", a, b)


def _make_op(op: str, count: int) -> Callable[..., Term]:
    def build_term(terms: Terms, *args: Term) -> Term:
        if len(args) != count:
            raise TypeError(f"{len(args)} arguments")
        return terms.make(op, *args)

    return build_term


def _number(value: float) -> Callable[..., Term]:
    return lambda terms, _: terms.constant(value)


# By torch's name without `_foreach_` and the trailing `_` of in-place ops.
OPS: dict[str, Callable[..., Term]] = {
    "add": _add,
    "sub": _sub,
    "mul": _mul,
    "rsub": _rsub,
    "div": _make_op("div", 2),
    "neg": _make_op("neg", 1),
    "sqrt": _make_op("sqrt", 1),
    "reciprocal": lambda terms, a: terms.make("div", terms.constant(1), a),
    "square": lambda terms, a: terms.make("mul", a, a),
    "pow": _pow,
    "maximum": _make_op("maximum", 2),
    "lerp": _make_op("lerp", 3),
    "fma": lambda terms, a, b, c: terms.make("add", c, terms.make("mul", a, b)),
    "addcmul": _addcmul,
    "addcdiv": _addcdiv,
    "clone": lambda terms, a: a,
    "copy": lambda terms, a, b: b,
    "fill": lambda terms, a, b: b,
    "full_like": lambda terms, a, b: b,
    "zero": _number(0),
    "zeros_like": _number(0),
    "ones_like": _number(1),
}
ALIASES = ("detach", "alias")
# Arguments that must be scalars, not tensors; torch's old signatures put a tensor elsewhere.
NUMBERS = ("alpha", "value")
LAYOUTS = ("memory_format", "non_blocking")  # without effect on values


@dataclass(frozen=True)
class _Call:
    """An op by name; whether it is on lists, and whether in place."""

    name: str
    on_lists: bool = False
    writes: bool = False


def _calls() -> Iterator[tuple[Any, _Call]]:
    for name in OPS:
        for prefix in ("", "_foreach_"):
            for suffix in ("", "_"):
                function = getattr(torch, f"{prefix}{name}{suffix}", None)
                if function is not None:
                    yield function, _Call(name, bool(prefix), bool(suffix))
    for name in ("add", "sub", "mul", "truediv", "pow"):
        yield getattr(operator, name), _Call(name.replace("true", ""))
        yield getattr(operator, f"i{name}"), _Call(name.replace("true", ""), writes=True)
    yield operator.neg, _Call("neg")
    yield "prims.fma.default", _Call("fma")  # torch registers it once Dynamo or Inductor needs it


CALLS = dict(_calls())


class Reading:
    """A graph read call by call: `values` are the cells of its tensors, given for its operands.

    `singles` are terms that stand for one number where tensors of more elements are computed.
    """

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self.values: dict[Node, Any] = {}  # a cell, a term (a number of Python's), a list of cells
        self.singles: set[Term] = set()
        self._at = 0

    def read(self, node: Node) -> None:
        """Follow one call. Raises `UnreadError`."""
        if node.op == "call_method":
            call = self._method(str(node.target))
        elif node.op == "call_function" and node.target is operator.getitem:
            items, index = self._value(node.args[0]), node.args[1]
            if not isinstance(items, list) or not isinstance(index, int):
                raise UnreadError("an index into a tensor")
            self.values[node] = items[index]
            return
        else:
            overload = isinstance(node.target, torch._ops.OpOverload)
            call = CALLS.get(str(node.target) if overload else node.target)
        name = getattr(node.target, "__name__", str(node.target))
        if isinstance(call, str):
            self.values[node] = self._alias(node, call)
            return
        if call is None:
            raise UnreadError(f"`{name}` is none of the operations that steps are made of")
        kwargs = {k: v for k, v in node.kwargs.items() if k not in LAYOUTS}
        args = [self._value(a) for a in node.args]
        named_values = {k: self._value(v) for k, v in kwargs.items()}
        try:
            self.values[node] = (
                self._each(node, call, args, named_values)
                if call.on_lists
                else self._one(node, None, call, args, named_values)
            )
        except TypeError as error:
            raise UnreadError(f"`{name}` with unsupported arguments: {error}") from error

    def _method(self, name: str) -> _Call | str | None:
        if name in (*ALIASES, "item"):
            return name
        base = name.removesuffix("_")
        return _Call(base, writes=base != name) if base in OPS else None

    def _alias(self, node: Node, name: str) -> Any:
        cell = self._value(node.args[0])
        if not isinstance(cell, Cell):
            raise UnreadError(f"`{name}` of something other than a tensor")
        if name != "item":
            return cell
        self.singles.add(cell.term)
        return cell.term

    def _value(self, argument: Any) -> Any:
        if isinstance(argument, Node):
            return self.values[argument]
        if isinstance(argument, (list, tuple)):
            return [self._value(item) for item in argument]
        if type(argument) in (int, float):
            return self.terms.constant(argument)
        raise UnreadError(f"an argument that is a {type(argument).__name__}")

    def _each(
        self, node: Node, call: _Call, args: list[Any], kwargs: dict[str, Any]
    ) -> list[Cell | Term]:
        lists = [a for a in (*args, *kwargs.values()) if isinstance(a, list)]
        if not lists or len({len(operands) for operands in lists}) > 1:
            raise UnreadError("lists of several lengths")
        return [
            self._one(
                node,
                index,
                call,
                [a[index] if isinstance(a, list) else a for a in args],
                {k: v[index] if isinstance(v, list) else v for k, v in kwargs.items()},
            )
            for index in range(len(lists[0]))
        ]

    def _one(
        self,
        node: Node,
        index: int | None,
        call: _Call,
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> Cell | Term:
        cells = [a for a in (*args, *kwargs.values()) if isinstance(a, Cell)]
        if call.name.startswith("addc"):
            named = dict(zip(("value",), args[3:], strict=False)) | kwargs
            if not all(isinstance(a, Cell) for a in args[:3]):
                raise UnreadError(f"`{call.name}` of numbers")
        else:
            named = kwargs
        if any(isinstance(named.get(name), Cell) for name in NUMBERS):
            raise UnreadError(f"`{call.name}` by a tensor")
        term = OPS[call.name](
            self.terms,
            *(a.term if isinstance(a, Cell) else a for a in args),
            **{k: v.term if isinstance(v, Cell) else v for k, v in kwargs.items()},
        )
        if not cells:
            return term
        target = args[0] if call.writes else None
        if target is not None and not isinstance(target, Cell):
            raise UnreadError(f"`{call.name}_` of a number")
        shape = target.shape if target is not None else _shape(cells)
        for cell in cells:
            if cell.shape != shape and not cell.single:
                raise UnreadError("tensors of several shapes in one operation")
            if not all(n == 1 for n in shape) and cell.single:
                self.singles.add(cell.term)
        if target is None:
            return Cell(term, shape, (node, index), last=self._next())
        self.write(target, term)
        return target

    def write(self, cell: Cell, term: Term) -> None:
        """Store a term in a cell, rounded to its dtype."""
        cell.term = self.terms.make(cell.stored, term) if cell.stored else term
        cell.last = self._next()

    def _next(self) -> int:
        self._at += 1
        return self._at


def _shape(cells: Sequence[Cell]) -> tuple[int, ...]:
    wide = [cell.shape for cell in cells if not cell.single]
    return wide[0] if wide else max((cell.shape for cell in cells), key=len)
