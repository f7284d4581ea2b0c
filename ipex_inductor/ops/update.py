"""Elementwise updates of many tensors as data: what a pass finds in a graph and a kernel does."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Update:
    """What is done to a row of tensors of one shape and layout, element by element.

    Lines are those of `templates/optimizer/formulas.py`: `scalars` (fp64, once a row) read
    `numbers` and `step`, which is 1 more than a tensor of one element and the dtype `counted` held;
    `lines` (each element) read and write `columns`, of which `stored` are kept. One column is
    `param`. Columns and numbers are in order, dtypes are names; that of a number is "" where the
    host knows it, else that of the tensor on the device that holds it.
    """

    columns: tuple[tuple[str, str], ...]  # name, dtype
    stored: tuple[str, ...]
    numbers: tuple[tuple[str, str], ...]  # name, dtype
    counted: str
    scalars: tuple[str, ...]
    lines: tuple[str, ...]

    @property
    def real(self) -> str:
        """The dtype of the arithmetic on elements."""
        return "float64" if "float64" in dict(self.columns).values() else "float32"


@dataclass(frozen=True)
class Held:
    """The number that an operand of one element holds at each call."""

    operand: int


@dataclass(frozen=True)
class Row:
    """The operands of an update: of its columns, of its step, if it counts one; its numbers."""

    columns: tuple[int, ...]
    step: int | None
    numbers: tuple[float | Held, ...]


@dataclass(frozen=True)
class Made:
    """A tensor that a graph makes and returns."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Program:
    """A graph that is updates and nothing else.

    Its operands are numbered: the inputs, the attributes by name, then what is made. Those of a row
    have one shape, and any layout. `written` are all that are given and change; `outputs` are made.
    All are on `device`, but for numbers that the host holds.
    """

    device: str
    attributes: tuple[str, ...]
    made: tuple[Made, ...]
    written: tuple[int, ...]
    outputs: tuple[int | None, ...]
    updates: dict[Update, list[Row]] = field(default_factory=dict)
