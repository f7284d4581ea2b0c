"""torch's own fused steps where they stand in a graph, `torch._fused_adamw_` and its like.

As terms of the formulas that our fused steps have: torch's kernels compute these in fp32 as well,
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
# What the lists of each are to its formula; `step` counts this step already.
LISTS: dict[str, tuple[str, ...]] = {
    "Adam": _ADAM,
    "AdamW": _ADAM,
    "SGD": ("param", "grad", "momentum_buffer"),
    "Adagrad": ("param", "grad", "sum", "step"),
}
SCALER = ("grad_scale", "found_inf")  # by which a step may be left out


@dataclass(frozen=True, eq=False)
class _Line:
    """A term in a formula's line, which is Python."""

    terms: Terms
    term: Term

    def made(self, op: str, *args: Any) -> "_Line":
        """An operation on what each of them is."""
        return _Line(self.terms, self.terms.make(op, *(_term(self.terms, a) for a in args)))

    def __add__(self, other: Any) -> "_Line":
        return self.made("add", self, other)

    def __radd__(self, other: Any) -> "_Line":
        return self if other == 0 else self.made("add", other, self)

    def __sub__(self, other: Any) -> "_Line":
        return self.made("sub", self, other)

    def __rsub__(self, other: Any) -> "_Line":
        return self.made("sub", other, self)

    def __mul__(self, other: Any) -> "_Line":
        return self.made("mul", self, other)

    def __rmul__(self, other: int) -> "_Line | int":
        """By 0, of what a first step finds in a buffer: nothing, were it NaN."""
        return 0 if other == 0 else self if other == 1 else self.made("mul", other, self)

    def __truediv__(self, other: Any) -> "_Line":
        return self.made("div", self, other)

    def __rtruediv__(self, other: Any) -> "_Line":
        return self.made("div", other, self)

    def __neg__(self) -> "_Line":
        return self.made("neg", self)

    def __lt__(self, other: float) -> bool:
        """Of what a beta makes; where that varies, either side of torch's `lerp` will do."""
        return self.term.op != "const" or bool(self.term.args[0] < other)


def _term(terms: Terms, value: Any) -> Term:
    return value.term if isinstance(value, _Line) else terms.constant(value)


WORDS: dict[str, Any] = {
    "sqrt": lambda x: x.made("sqrt", x),
    "pow": lambda a, b: b.made("pow", a, b),
    "maximum": lambda a, b: a.made("maximum", a, b),
    "where": lambda condition, yes, no: yes if condition else no,
}


def read(reading: Reading, node: Node) -> None:
    """Follow the call of one of `FUSED_STEPS`. Raises `UnreadError`."""
    name = FUSED_STEPS[node.target]
    rule, names, given = FORMULAS[name], LISTS[name], dict(node.kwargs)
    if any(given.get(each) is not None for each in SCALER):
        raise UnreadError("a fused step of torch's under a GradScaler")
    if len(node.args) != len(names):
        raise UnreadError("a fused step of torch's whose lists are not in a row")
    on = frozenset(flag for flag in rule.flags if given.get(flag))
    on |= {"decoupled_weight_decay"} if name == "AdamW" else frozenset()
    own: dict[str, Any] = {each: _number(reading, given[each]) for each in rule.numbers}
    if isinstance(given["lr"], Node):  # as a product it is no rate that eager ops combine in fp32
        own["lr"] = _Line(reading.terms, reading.terms.constant(1)).made("mul", 1, own["lr"])
    own["first"] = given.get("is_first_step", False)
    wanted = {"param", "grad", "step", *rule.state(on)}
    lists: dict[str, list[Cell]] = {}
    for each, held in zip(names, node.args, strict=True):
        if each in wanted:
            lists[each] = [reading.values[item] for item in cast(list[Node], held)]
    if len({len(cells) for cells in lists.values()}) > 1:
        raise UnreadError("lists of several lengths")
    # Formulas are lines of Python, our own: here of terms.
    code = compile("\n".join((*rule.scalars(on), *rule.update(on))), name, "exec")
    for row in zip(*lists.values(), strict=True):
        cells = dict(zip(lists, row, strict=True))
        made = _stepped(reading, code, own, cells)
        for each in (*rule.state(on), "param"):
            reading.write(cells[each], made[each])
    reading.values[node] = None


def _number(reading: Reading, value: Any) -> _Line:
    """A number of the group: Python's, or one that a tensor holds."""
    if not isinstance(value, Node):
        return _Line(reading.terms, reading.terms.constant(float(value)))
    return _single(reading, reading.values[value])


def _single(reading: Reading, held: Any) -> _Line:
    """The one number of a tensor, or of its `item()`."""
    term = held.term if isinstance(held, Cell) else held
    reading.singles.add(term)
    return _Line(reading.terms, term)


def _stepped(
    reading: Reading, code: CodeType, own: Mapping[str, Any], cells: Mapping[str, Cell]
) -> dict[str, Term]:
    """What the formula makes of one parameter and its state."""
    scope = dict(own)
    for name, cell in cells.items():
        single = name == "step"
        if cell.shape != cells["param"].shape and not single:
            raise UnreadError("tensors of several shapes in one operation")
        scope[name] = _single(reading, cell) if single else _Line(reading.terms, cell.term)
    exec(code, {**WORDS}, scope)
    return {name: each.term for name, each in scope.items() if isinstance(each, _Line)}
