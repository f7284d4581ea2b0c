"""Elementwise updates of many tensors as data: a pass finds them, a kernel runs them."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Update:
    """An elementwise update of a row of tensors of one shape and layout.

    Lines are those of `templates/optimizer/formulas.py`. `scalars` (fp64, once a row) read
    `numbers` and `step`, which is 1 more than a one-element tensor of dtype `counted` held. `lines`
    (each element) read and write `columns`, of which `stored` are written back. One column is
    `param`. Columns and numbers are in order, dtypes are names; the dtype of a number is "" if the
    host knows its value, else the dtype of the device tensor that holds it.
    """

    columns: tuple[tuple[str, str], ...]  # name, dtype
    stored: tuple[str, ...]
    numbers: tuple[tuple[str, str], ...]  # name, dtype
    counted: str
    scalars: tuple[str, ...]
    lines: tuple[str, ...]

    @property
    def real(self) -> str:
        """Return the dtype of the arithmetic on elements."""
        return "float64" if "float64" in dict(self.columns).values() else "float32"


@dataclass(frozen=True)
class HostScalar:
    """An operand of one element whose value is read at each call."""

    operand: int


@dataclass(frozen=True)
class Row:
    """The operands of one update: indices of its columns and of its step (or None), its numbers."""

    columns: tuple[int, ...]
    step: int | None
    numbers: tuple[float | HostScalar, ...]


@dataclass(frozen=True)
class Allocated:
    """A tensor that a graph allocates and returns."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Program:
    """A graph that consists of updates only.

    Operands are numbered: the inputs, the attributes by name, then the allocated tensors. The
    operands of a row have one shape, and any layout. `written` lists the given operands that
    change; `outputs` the returned allocated ones. All are on `device`, except for numbers that the
    host holds.
    """

    device: str
    attributes: tuple[str, ...]
    allocated: tuple[Allocated, ...]
    written: tuple[int, ...]
    outputs: tuple[int | None, ...]
    updates: dict[Update, list[Row]] = field(default_factory=dict)
