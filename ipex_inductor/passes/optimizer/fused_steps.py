"""Read torch's own fused steps in a graph, `torch._fused_adamw_` and its like.

They become terms of the formulas of our fused steps: torch's kernels compute these in fp32 as well,
and round once what they store.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import CodeType
from typing import Any, cast

from torch.fx import Node

from ipex_inductor.passes.engine.source import FUSED_STEPS
from ipex_inductor.passes.optimizer.terms import Cell, Reading, Term, Terms, UnreadError
from ipex_inductor.templates.optimizer.formulas import FORMULAS

_ADAM = ("param", "grad", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step")
# The names of the op's tensor lists in its formula; `step` already includes this step.
LISTS: dict[str, tuple[str, ...]] = {
    "Adam": _ADAM,
    "AdamW": _ADAM,
    "SGD": ("param", "grad", "momentum_buffer"),
    "Adagrad": ("param", "grad", "sum", "step"),
}
SCALER = ("grad_scale", "found_inf")  # a GradScaler skips steps by them


@dataclass(frozen=True, eq=False)
class _Line:
    """A term in a formula's line, which is Python code."""

    terms: Terms
    term: Term

    def operate(self, op: str, *args: Any) -> "_Line":
        """Return the term of an operation on these arguments."""
        return _Line(self.terms, self.terms.make(op, *(_term(self.terms, a) for a in args)))

    def __add__(self, operand: Any) -> "_Line":
        return self.operate("add", self, operand)

    def __radd__(self, operand: Any) -> "_Line":
        return self if operand == 0 else self.operate("add", operand, self)

    def __sub__(self, operand: Any) -> "_Line":
        return self.operate("sub", self, operand)

    def __rsub__(self, operand: Any) -> "_Line":
        return self.operate("sub", operand, self)

    def __mul__(self, operand: Any) -> "_Line":
        return self.operate("mul", self, operand)

    def __rmul__(self, operand: int) -> "_Line | int":
        """Return the product with an int; 0 times anything is 0, even NaN.

        A first step multiplies a buffer by 0.
        """
        return 0 if operand == 0 else self if operand == 1 else self.operate("mul", operand, self)

    def __truediv__(self, operand: Any) -> "_Line":
        return self.operate("div", self, operand)

    def __rtruediv__(self, operand: Any) -> "_Line":
        return self.operate("div", operand, self)

    def __neg__(self) -> "_Line":
        return self.operate("neg", self)

    def __lt__(self, bound: float) -> bool:
        """Compare a constant with a bound; a term that varies counts as less.

        Either side of torch's `lerp` is correct for a term that varies.
        """
        return self.term.op != "const" or bool(self.term.args[0] < bound)


def _term(terms: Terms, value: Any) -> Term:
    return value.term if isinstance(value, _Line) else terms.constant(value)


WORDS: dict[str, Any] = {
    "sqrt": lambda x: x.operate("sqrt", x),
    "pow": lambda a, b: b.operate("pow", a, b),
    "maximum": lambda a, b: a.operate("maximum", a, b),
    "where": lambda condition, yes, no: yes if condition else no,
}


def read(reading: Reading, node: Node) -> None:
    """Follow the call of one of `FUSED_STEPS`. Raises `UnreadError`."""
    name = FUSED_STEPS[node.target]
    rule, names, options = FORMULAS[name], LISTS[name], dict(node.kwargs)
    if any(options.get(key) is not None for key in SCALER):
        raise UnreadError("a fused step of torch's under a GradScaler")
    if len(node.args) != len(names):
        raise UnreadError("a fused step of torch's with keyword lists")
    on = frozenset(flag for flag in rule.flags if options.get(flag))
    on |= {"decoupled_weight_decay"} if name == "AdamW" else frozenset()
    numbers: dict[str, Any] = {key: _number(reading, options[key]) for key in rule.numbers}
    # As a product the rate is not one that eager ops combine in fp32.
    if isinstance(options["lr"], Node):
        one = _Line(reading.terms, reading.terms.constant(1))
        numbers["lr"] = one.operate("mul", 1, numbers["lr"])
    numbers["first"] = options.get("is_first_step", False)
    wanted = {"param", "grad", "step", *rule.state(on)}
    lists: dict[str, list[Cell]] = {}
    for key, held in zip(names, node.args, strict=True):
        if key in wanted:
            lists[key] = [reading.values[item] for item in cast(list[Node], held)]
    if len({len(cells) for cells in lists.values()}) > 1:
        raise UnreadError("lists of several lengths")
    # Formulas are Python lines of this package, evaluated on terms here.
    code = compile("\n".join((*rule.scalars(on), *rule.update(on))), name, "exec")
    for row in zip(*lists.values(), strict=True):
        cells = dict(zip(lists, row, strict=True))
        results = _step_parameter(reading, code, numbers, cells)
        for key in (*rule.state(on), "param"):
            reading.write(cells[key], results[key])
    reading.values[node] = None


def _number(reading: Reading, value: Any) -> _Line:
    """Return the term of a number of the group, which Python or a tensor holds."""
    if not isinstance(value, Node):
        return _Line(reading.terms, reading.terms.constant(float(value)))
    return _single(reading, reading.values[value])


def _single(reading: Reading, held: Any) -> _Line:
    """Return the one number of a tensor, or of its `item()`."""
    term = held.term if isinstance(held, Cell) else held
    reading.singles.add(term)
    return _Line(reading.terms, term)


def _step_parameter(
    reading: Reading, code: CodeType, numbers: Mapping[str, Any], cells: Mapping[str, Cell]
) -> dict[str, Term]:
    """Return the terms that the formula gives for one parameter and its state."""
    scope = dict(numbers)
    for name, cell in cells.items():
        single = name == "step"
        if cell.shape != cells["param"].shape and not single:
            raise UnreadError("tensors of several shapes in one operation")
        scope[name] = _single(reading, cell) if single else _Line(reading.terms, cell.term)
    exec(code, {**WORDS}, scope)
    return {name: value.term for name, value in scope.items() if isinstance(value, _Line)}
