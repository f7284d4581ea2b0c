"""Elementwise updates of many tensors as data: what a pass finds in a graph and a kernel does."""

from dataclasses import dataclass, field

Number = float | int  # a value, or the operand of one element that holds it


@dataclass(frozen=True)
class Update:
    """What is done to a row of tensors of one shape and layout, element by element.

    Lines are those of `templates/formulas.py`: `scalars` (fp64, once a row) read `numbers` and
    `step`, which `counted`, a tensor of one element and that dtype, holds plus 1; `lines` (each
    element) read and write `columns`, of which `stored` are kept. One column is `param`.
    """

    columns: tuple[tuple[str, str], ...]  # name, dtype
    stored: tuple[str, ...]
    numbers: tuple[str, ...]
    counted: str
    scalars: tuple[str, ...]
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Row:
    """The operands of an update: those of its columns, of its step, and its numbers."""

    columns: tuple[int, ...]
    step: int | None
    numbers: tuple[Number, ...]


@dataclass(frozen=True)
class Made:
    """A tensor that the graph makes and returns."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Program:
    """A whole graph as updates. Its operands: the inputs, the attributes, then what is made.

    Those of a row have one shape, and any layout.
    """

    inputs: int
    attributes: tuple[str, ...]
    made: tuple[Made, ...]
    written: tuple[int, ...]
    outputs: tuple[int | None, ...]
    updates: dict[Update, list[Row]] = field(default_factory=dict)
