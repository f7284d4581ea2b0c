"""Turn terms of what tensors hold after a graph into updates: lines of kernels, and operands."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ipex_inductor.ops.optimizer.update import HostScalar, Row, Update
from ipex_inductor.passes.optimizer.terms import Cell, Term, Terms, UnreadError

# Ints that are literals in lines. Floats are arguments, else each rate needs its own kernel.
LITERALS = (-1, 0, 1, 2)
SINGLE = "as_float32({})"  # rounds an fp64 term to fp32
LINES = {
    "add": "{} + {}",
    "sub": "{} - {}",
    "mul": "{} * {}",
    "div": "{} / {}",
    "neg": "-{}",
    "sqrt": "sqrt({})",
    "pow": "pow({}, {})",
    "maximum": "maximum({}, {})",
    # torch's formula
    "lerp": "where({2} < 0.5, {0} + {2} * ({1} - {0}), {1} - ({1} - {0}) * (1 - {2}))",
}


class Writing:
    """The updates of a graph with these operands, read to its end.

    Raises `UnreadError` where terms of `singles` are no numbers.
    """

    def __init__(
        self,
        terms: Terms,
        cells: Sequence[Cell],
        examples: Sequence[Tensor],
        singles: set[Term],
    ) -> None:
        self.cells = cells
        self.examples = examples
        self.device = _device(examples)
        self.leaves = [terms.make("leaf", n) for n in range(len(cells))]
        self.written = [n for n, c in enumerate(cells) if c.term is not self.leaves[n]]
        self.counters = self._counters(terms)
        counted = set(self.counters.values())
        self.elements = [n for n in self.written if n not in counted]
        # A row reads one number of a one-element tensor, ...
        self.scalars = {
            n for n, c in enumerate(cells) if c.single and n not in self.elements
        } | counted
        self._scalar: dict[Term, bool] = {}
        # ... except of the gradient of a one-element parameter.
        self.scalars -= self._gradients(singles) - counted
        self._scalar = {}
        if not all(map(self._is_scalar, singles)):
            raise UnreadError("a tensor of one element that is combined with larger ones")

    def updates(self) -> dict[Update, list[Row]]:
        """Return all rows, grouped by their update."""
        rows_of: dict[Update, list[Row]] = {}
        counted: set[int] = set()
        for operands in self._rows():
            update, row = self._row(operands)
            if row.step in counted:
                raise UnreadError("a step that several parameters count")
            counted |= set() if row.step is None else {row.step}
            rows_of.setdefault(update, []).append(row)
        if not rows_of:
            raise UnreadError("no tensor is written")
        numbers = {n for rows in rows_of.values() for row in rows for n in row.numbers}
        if any(isinstance(n, HostScalar) and n.operand in counted for n in numbers):
            raise UnreadError("a step that one parameter counts and another reads")
        return rows_of

    def _counters(self, terms: Terms) -> dict[Term, int]:
        """Return the step counters: numbers that grow by 1 and are used for other tensors."""
        ones = terms.constant(1), terms.constant(1.0)
        counters = {
            self.cells[n].term: n
            for n in self.written
            if self.cells[n].single
            and self.cells[n].term in [terms.make("add", self.leaves[n], one) for one in ones]
        }
        other_terms = [
            self.cells[n].term for n in self.written if self.cells[n].term not in counters
        ]
        return {term: counters[term] for term in _below(other_terms) if term in counters}

    def _gradients(self, singles: set[Term]) -> set[int]:
        """Return operands that only one row reads, in the row's shape, and never as a number."""
        readers: dict[int, list[int]] = {}
        for operands in self._rows():
            for leaf in {leaf for n in operands for leaf in _leaves(self.cells[n].term)}:
                readers.setdefault(leaf, []).append(operands[0])
        numbers = {leaf for term in singles for leaf in _leaves(term)}
        return {
            leaf
            for leaf, rows in readers.items()
            if len(rows) == 1
            and leaf not in numbers
            and self.cells[leaf].shape == self.cells[rows[0]].shape
        }

    def _is_scalar(self, term: Term) -> bool:
        """Return whether a term has one value for a row."""
        if term not in self._scalar:
            for part in _below([term]):
                self._scalar[part] = part.op == "const" or (
                    part.args[0] in self.scalars
                    if part.op == "leaf"
                    else all(self._scalar[a] for a in part.args)
                )
        return self._scalar[term]

    def _rows(self) -> Iterator[list[int]]:
        """Yield written operands, grouped where they depend on common operands; the last one first.

        What is written last is the parameter itself, in every optimizer of torch's.
        """
        above: dict[int, int] = {}

        def top(n: int) -> int:
            while above.setdefault(n, n) != n:
                n = above[n]
            return n

        for n in self.elements:
            for leaf in _leaves(self.cells[n].term):
                if leaf not in self.scalars:
                    above[top(leaf)] = top(n)
        rows: dict[int, list[int]] = {}
        for n in sorted(self.elements, key=lambda n: self.cells[n].last):
            rows.setdefault(top(n), []).append(n)
        for row in rows.values():
            yield [row[-1], *row[:-1]]

    def _row(self, operands: Sequence[int]) -> tuple[Update, Row]:
        ends = [self.cells[n].term for n in operands]
        below = _below(ends)
        names = self._names(operands, below)
        if any(self.cells[n].shape != self.cells[operands[0]].shape for n in names):
            raise UnreadError("tensors of several shapes in one update")
        steps = {self.counters[term] for term in below if term in self.counters}
        if any(self.examples[n].device != self.device for n in (*names, *steps)):
            raise UnreadError("a tensor of the host is updated, or updates those of a GPU")
        if len(steps) > 1:
            raise UnreadError("a parameter with two steps")
        text = {self.leaves[n]: name for n, name in names.items()}
        for n in steps:
            text |= {self.cells[n].term: "now", self.leaves[n]: "before"}
        numbers: dict[str, float | HostScalar] = {}
        scalars = ["now = step", "before = step - 1"] if steps else []
        lines: list[str] = []
        read = {a for term in below for a in term.terms}
        rounded = self._find_fp32_terms(below) if "float64" in map(self._dtype, operands) else set()
        for term in below:
            if term in text:
                continue
            if term.op in ("leaf", "const"):
                text[term] = _number(term, numbers)
            elif term.op.startswith("as_") and not (term in ends and term in read):
                text[term] = text[term.args[0]]  # rounded only where it is stored
            else:
                target_lines = scalars if self._is_scalar(term) else lines
                text[term] = f"{'s' if target_lines is scalars else 't'}{len(target_lines)}"
                line = _line(term, text, SINGLE if term in rounded else "{}")
                target_lines.append(f"{text[term]} = {line}")
        stored = [names[n] for n in operands]
        lines += [f"{name}_new = {text[end]}" for name, end in zip(stored, ends, strict=True)]
        lines += [f"{name} = {name}_new" for name in stored]
        update = Update(
            columns=tuple((name, dtype_name(self.examples[n])) for n, name in names.items()),
            stored=tuple(stored),
            numbers=tuple((name, self._held_as(n)) for name, n in numbers.items()),
            counted="".join(dtype_name(self.examples[n]) for n in steps),
            scalars=tuple(scalars),
            lines=tuple(lines),
        )
        return update, Row(tuple(names), next(iter(steps), None), tuple(numbers.values()))

    def _find_fp32_terms(self, below: Sequence[Term]) -> set[Term]:
        """Return the terms of an fp32 rate that torch computes in fp32, though elements are fp64.

        Only ops of eager steps count: `rate * x` and `rate / x`, where x is a Python number or
        comes from the step, and then sums and products with constants.
        """
        counted = set(self.counters.values())
        rates = {
            self.leaves[n]
            for n in self.scalars - counted
            if self._dtype(n) == "float32" and self.cells[n].term is self.leaves[n]
        }
        fp32_terms: set[Term] = set()
        derived: set[Term] = set()  # computed from these terms, or from their negation
        for term in below:
            are_derived = [a in derived for a in term.terms if a.op != "const"]
            follows = term.op in ("add", "sub", "mul") and any(are_derived) and all(are_derived)
            if follows or (term.op in ("mul", "div") and term.terms[0] in rates):
                fp32_terms.add(term)
            if term in fp32_terms or (term.op == "neg" and term.terms[0] in derived):
                derived.add(term)
        return {term for term in fp32_terms if self._is_scalar(term)}

    def _dtype(self, operand: int) -> str:
        return dtype_name(self.examples[operand])

    def _held_as(self, number: float | HostScalar) -> str:
        """Return the dtype of a number that a device holds; "" for numbers known to the host."""
        example = self.examples[number.operand] if isinstance(number, HostScalar) else None
        return "" if example is None or example.device.type == "cpu" else dtype_name(example)

    def _names(self, operands: Sequence[int], below: Sequence[Term]) -> dict[int, str]:
        """Return the columns of a row: operands that are written, then operands that are read."""
        names = {n: f"state{place}" if place else "param" for place, n in enumerate(operands)}
        leaves = [term.args[0] for term in below if term.op == "leaf"]
        read = [n for n in leaves if n not in names and n not in self.scalars]
        return names | {n: f"grad{place}" for place, n in enumerate(read)}


def dtype_name(tensor: Tensor) -> str:
    """Return a tensor's dtype, such as `float32`."""
    return str(tensor.dtype).removeprefix("torch.")


def _device(examples: Sequence[Tensor]) -> torch.device:
    """Return the device of the tensors; besides a GPU's tensors, the host may hold numbers."""
    devices = {t.device for t in examples} or {torch.device("cpu")}
    accelerators = {device for device in devices if device.type != "cpu"} or devices
    if len(accelerators) > 1:
        raise UnreadError("tensors of several devices")
    return accelerators.pop()


def _number(term: Term, numbers: dict[str, float | HostScalar]) -> str:
    value = term.args[0]
    if term.op == "const" and type(value) is int and value in LITERALS:
        return str(value) if value >= 0 else f"({value})"
    name = f"n{len(numbers)}"
    numbers[name] = HostScalar(value) if term.op == "leaf" else float(value)
    return name


def _line(term: Term, text: Mapping[Term, str], rounded: str) -> str:
    """Return the expression of a term, with its operands and its result `rounded`."""
    form = LINES.get(term.op) or f"{term.op}({{}})"
    return rounded.format(form.format(*(rounded.format(text[a]) for a in term.args)))


def _below(terms: Sequence[Term]) -> list[Term]:
    """Return the terms and all terms they are made of, each after its arguments."""
    visited: set[Term] = set()
    pending = list(terms)
    while pending:
        term = pending.pop()
        if term not in visited:
            visited.add(term)
            pending += term.terms
    return sorted(visited, key=lambda item: item.serial)


def _leaves(term: Term) -> list[int]:
    return [part.args[0] for part in _below([term]) if part.op == "leaf"]
