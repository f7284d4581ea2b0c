"""The step of an optimizer, read from its Dynamo graph: which tensors it updates, and how.

Dynamo gives a step a graph of its own, of foreach or single-tensor ops. Whatever formula they
spell is taken as it stands, so nothing here knows optimizers or their versions of it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ipex_inductor.ops.update import Made, Number, Program, Row, Update
from ipex_inductor.passes.terms import ALIASES, Cell, Reading, Term, Terms, UnreadError

NAME = "optimizer-step"
REALS = ("float64", "float32", "float16", "bfloat16")
LOW = ("float16", "bfloat16")
LITERALS = (-1, 0, 1, 2)  # Python's ints that stand in lines; every float is a number, or each
# learning rate would be a kernel of its own

# Terms as lines of `templates/formulas.py`.
LINES = {
    "add": "{} + {}",
    "sub": "{} - {}",
    "mul": "{} * {}",
    "div": "{} / {}",
    "neg": "-{}",
    "sqrt": "sqrt({})",
    "pow": "pow({}, {})",
    "maximum": "maximum({}, {})",
    "lerp": "where({2} < 0.5, {0} + {2} * ({1} - {0}), {1} - ({1} - {0}) * (1 - {2}))",
}


def is_step(gm: torch.fx.GraphModule) -> bool:
    """Whether this is the step of an optimizer, by the source of its first operation."""
    calls = (n for n in gm.graph.nodes if n.op in ("call_function", "call_method"))
    first = next((n.stack_trace for n in calls if n.stack_trace), "")
    return "torch/optim/" in first.replace("\\", "/")


def program_of(gm: torch.fx.GraphModule) -> tuple[Program, list[Tensor]]:
    """All that `gm` does, as updates of its operands, and an example of each operand.

    Raises `UnreadError` if it does more.
    """
    follows = begun = torch.is_grad_enabled()
    terms = Terms()
    reading = Reading(terms)
    operands = _Operands(gm, terms)
    returned: tuple[Any, ...] = ()
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            reading.bind(node, operands.take(node))
        elif node.op == "output":
            returned = tuple(node.args[0])
        elif node.target is torch._C._set_grad_enabled:
            follows = bool(node.args[0])
        elif follows:
            raise UnreadError("autograd follows what is computed")
        else:
            reading.read(node)
    if follows != begun:
        raise UnreadError("gradients are switched on or off for what comes after")
    outputs = tuple(operands.returned(value, reading.values) for value in returned)
    return _Writer(operands, terms, reading.singles).program(outputs), operands.examples


class _Operands:
    """The tensors a graph is given, or makes to return them."""

    def __init__(self, gm: torch.fx.GraphModule, terms: Terms) -> None:
        self.gm = gm
        self._held = gm._buffers.keys() | gm._parameters.keys()
        self.terms = terms
        self.inputs = 0
        self.attributes: list[str] = []
        self.cells: list[Cell] = []
        self.examples: list[Tensor] = []
        self._known: dict[int, Cell] = {}

    def take(self, node: torch.fx.Node) -> Cell:
        """The cell of an input or attribute."""
        if node.op == "placeholder":
            example = node.meta.get("example_value")
            if self.attributes or not isinstance(example, Tensor):
                raise UnreadError(f"an input that is a {type(example).__name__}")
            self.inputs += 1
        else:
            example = getattr(self.gm, str(node.target), None)
            if id(example) in self._known:
                return self._known[id(example)]
            held = str(node.target) in self._held
            if type(example) not in (Tensor, nn.Parameter) or not held:
                raise UnreadError(f"an attribute that is a {type(example).__name__}")
            self.attributes.append(str(node.target))
        _check(example)
        cell = self._add(example, (node, None))
        self._known[id(example)] = cell
        return cell

    def returned(self, value: Any, values: Mapping[torch.fx.Node, Any]) -> int | None:
        """The operand that is an output."""
        if value is None:
            return None
        cell = values.get(value) if isinstance(value, torch.fx.Node) else None
        if not isinstance(cell, Cell) or value.target in ALIASES:
            raise UnreadError("an output that is no tensor of its own")
        if cell.operand is None:
            node, index = cell.origin
            example = node.meta["example_value"]
            example = example if index is None else example[index]
            _check(example)
            if tuple(example.shape) != cell.shape:
                raise UnreadError("an output of another shape than what it is made of")
            made = self._add(example, cell.origin)
            made.term, made.written, made.last = cell.term, cell.last, cell.last
            cell.operand = made.operand
        return cell.operand

    def _add(self, example: Tensor, origin: tuple[torch.fx.Node, int | None]) -> Cell:
        place = len(self.cells)
        leaf = self.terms.make("leaf", place)
        cell = Cell(leaf, tuple(example.shape), origin, operand=place)
        self.cells.append(cell)
        self.examples.append(example)
        return cell


def _check(example: Tensor) -> None:
    if type(example) not in (Tensor, nn.Parameter, torch._subclasses.FakeTensor):
        raise UnreadError(f"a {type(example).__name__}")
    if example.layout is not torch.strided:
        raise UnreadError("sparse tensors")
    if example.device.type != "cpu":
        raise UnreadError(f"no kernel for {example.device.type} yet")
    if any(not isinstance(n, int) for n in (*example.shape, *example.stride())):
        raise UnreadError("shapes that are symbols")
    if _name(example) not in REALS:
        raise UnreadError(f"tensors of {example.dtype}")
    if example.is_neg() or example.is_inference():
        raise UnreadError("a tensor that is negated when it is read, or made in inference mode")


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


class _Writer:
    """Terms as updates of rows of operands."""

    def __init__(self, operands: _Operands, terms: Terms, singles: set[Term]) -> None:
        self.operands = operands
        self.terms = terms
        self.singles = singles
        one = terms.constant(1)
        self.leaves = [terms.make("leaf", n) for n in range(len(operands.cells))]
        written = [
            c for c, leaf in zip(operands.cells, self.leaves, strict=True) if c.term is not leaf
        ]
        plus = {
            c: [terms.make("add", self.leaves[_of(c)], k) for k in (one, terms.constant(1.0))]
            for c in written
        }
        self.counters = {c.term: c for c in written if c.single and c.term in plus[c]}
        read = {*_below([c.term for c in written if c.term not in self.counters])}
        self.counters = {term: c for term, c in self.counters.items() if term in read}
        self.elements = [c for c in written if c.term not in self.counters]
        self.written = [_of(c) for c in written if _of(c) < self._given]
        shaped = {_of(c) for c in self.elements}
        count = {_of(c) for c in self.counters.values()}
        # Those of which a row has one value.
        self.scalars = {
            n for n, c in enumerate(operands.cells) if n in count or (c.single and n not in shaped)
        }
        self._scalar: dict[Term, bool] = {}
        self.scalars -= self._gradients()
        self._scalar = {}

    @property
    def _given(self) -> int:
        return self.operands.inputs + len(self.operands.attributes)

    def program(self, outputs: tuple[int | None, ...]) -> Program:
        """All rows, those of one update together."""
        if not self.elements:
            raise UnreadError("no tensor is written")
        if not all(map(self.is_scalar, self.singles)):
            raise UnreadError("a tensor of one element that is combined with larger ones")
        made = [
            Made(tuple(t.shape), tuple(t.stride()), _name(t))
            for t in self.operands.examples[self._given :]
        ]
        found = Program(
            self.operands.inputs,
            tuple(self.operands.attributes),
            tuple(made),
            tuple(self.written),
            outputs,
        )
        counted: set[int] = set()
        for cells in self._rows():
            update, row = self._row(cells)
            if row.step is not None:
                if row.step in counted:
                    raise UnreadError("a step that several parameters count")
                counted.add(row.step)
            found.updates.setdefault(update, []).append(row)
        return found

    def is_scalar(self, term: Term) -> bool:
        """Whether a row has one value of it."""
        if term in self._scalar:
            return self._scalar[term]
        for each in _below([term]):
            if each not in self._scalar:
                self._scalar[each] = (
                    each.args[0] in self.scalars
                    if each.op == "leaf"
                    else each.op == "const" or all(self._scalar[a] for a in each.args)
                )
        return self._scalar[term]

    def _gradients(self) -> set[int]:
        """Scalars that only one row reads, of its shape: a column there, as in larger rows."""
        readers: dict[int, list[Cell]] = {}
        for cells in self._rows():
            for leaf in {leaf for c in cells for leaf in _leaves(c.term)}:
                readers.setdefault(leaf, []).append(cells[-1])
        counted = {_of(c) for c in self.counters.values()}
        numbers = {leaf for term in self.singles for leaf in _leaves(term)}
        return {
            leaf
            for leaf, (first, *more) in readers.items()
            if leaf in self.scalars - counted - numbers
            and not more
            and first.shape == self.operands.cells[leaf].shape
        }

    def _rows(self) -> Iterator[list[Cell]]:
        """Written tensors, together where their new values depend on the same ones."""
        homes: dict[int, list[Cell]] = {}  # of each operand
        for cell in self.elements:
            home = homes.setdefault(_of(cell), [])
            home.append(cell)
            for leaf in _leaves(cell.term):
                there = home if leaf in self.scalars else homes.setdefault(leaf, home)
                if there is not home:
                    home += there
                    homes |= {n: home for n, row in homes.items() if row is there}
        for row in {id(row): row for row in homes.values()}.values():
            yield sorted(row, key=_when)

    def _row(self, cells: Sequence[Cell]) -> tuple[Update, Row]:
        """One row: what is written first is named first, and last of all what is its `param`."""
        cells = [cells[-1], *cells[:-1]]
        below = list(_below([c.term for c in cells]))
        names, columns = self._columns(cells, below)
        if any(self.operands.cells[n].shape != cells[0].shape for n in columns):
            raise UnreadError("tensors of several shapes in one update")
        dtypes = [_name(self.operands.examples[n]) for n in columns]
        inner = {a for term in below if term.op not in ("leaf", "const") for a in term.args}
        # What is read again after the last write to a tensor was rounded to its dtype.
        rounded = {
            c.term: dtype
            for c, dtype in zip(cells, dtypes, strict=False)
            if dtype in LOW and c.term in inner
        }
        step: int | None = None
        text: dict[Term, str] = {self.leaves[n]: name for n, name in names.items()}
        numbers: dict[str, Number] = {}
        scalars: list[str] = []
        lines: list[str] = []
        for term in below:
            if term in self.counters:
                counter = _of(self.counters[term])
                if step not in (None, counter):
                    raise UnreadError("a parameter with two steps")
                step = counter
                text[term], text[self.leaves[counter]] = "step", "(step - 1)"
        for term in below:
            if term in text:
                continue
            if term.op in ("const", "leaf"):
                text[term] = self._number(term, numbers)
                continue
            if self.is_scalar(term):
                text[term] = f"s{len(scalars)}"
                scalars.append(f"{text[term]} = {_line(term, text)}")
                continue
            text[term] = f"t{len(lines)}"
            line = _line(term, text)
            kept = rounded.get(term)
            lines.append(f"{text[term]} = {f'as_{kept}({line})' if kept else line}")
        last = [text[c.term] for c in cells]
        kept_names = [names[_of(c)] for c in cells]
        lines += [f"{name}_new = {value}" for name, value in zip(kept_names, last, strict=True)]
        lines += [f"{name} = {name}_new" for name in kept_names]
        update = Update(
            columns=tuple(zip(names.values(), dtypes, strict=True)),
            stored=tuple(kept_names),
            numbers=tuple(numbers),
            counted="" if step is None else _name(self.operands.examples[step]),
            scalars=tuple(scalars),
            lines=tuple(lines),
        )
        return update, Row(tuple(columns), step, tuple(numbers.values()))

    def _columns(
        self, cells: Sequence[Cell], below: Sequence[Term]
    ) -> tuple[dict[int, str], list[int]]:
        names = {_of(c): f"state{n}" if n else "param" for n, c in enumerate(cells)}
        read = 0
        for term in below:
            if term.op == "leaf" and term.args[0] not in (*names, *self.scalars):
                names[term.args[0]] = f"grad{read}"
                read += 1
        return names, list(names)

    def _number(self, term: Term, numbers: dict[str, Number]) -> str:
        value: Any = term.args[0]
        if term.op == "const" and type(value) is int and value in LITERALS:
            return str(value) if value >= 0 else f"({value})"
        name = f"n{len(numbers)}"
        numbers[name] = int(value) if term.op == "leaf" else float(value)
        return name


def _of(cell: Cell) -> int:
    assert cell.operand is not None
    return cell.operand


def _when(cell: Cell) -> tuple[int, int]:
    return cell.last, cell.written or 0


def _line(term: Term, text: Mapping[Term, str]) -> str:
    return LINES[term.op].format(*(text[a] for a in term.args))


def _below(terms: Sequence[Term]) -> list[Term]:
    """These and all they are made of, each after what it is made of."""
    found: set[Term] = set()
    left = list(terms)
    while left:
        term = left.pop()
        if term not in found:
            found.add(term)
            if term.op not in ("leaf", "const"):
                left += term.args
    return sorted(found, key=lambda each: each.serial)


def _leaves(term: Term) -> list[int]:
    return [each.args[0] for each in _below([term]) if each.op == "leaf"]
