"""Rows for terminals and files: a table if it fits, records if not, plain lines in files.

A table fits if no word is broken and no cell takes more than `LINES` lines. Records are blocks of
"head: cell" lines. Plain lines have no frames: no text in them is cut or folded.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Column, Table
from rich.text import Text

LINES = 3  # most lines of a cell; beyond, a record is easier to read
PADDING = 2  # terminal columns after each cell
PLAIN_WIDTH = 200  # most columns of rows outside a terminal as lines with aligned cells

Cell = str | Text


def number(head: str) -> Column:
    """Return a column of figures, which are right-aligned and never broken."""
    return Column(head, justify="right", no_wrap=True)


class Listing:
    """Rows under heads, displayed as the width and the kind of a rich console allow."""

    def __init__(self, *heads: str | Column, title: Cell = "") -> None:
        self.columns = [head if isinstance(head, Column) else Column(head) for head in heads]
        self.title = title if isinstance(title, Text) else Text(title, "bold")
        self.rows: list[list[Text]] = []

    def add_row(self, *cells: Cell) -> None:
        """Add a row; missing cells at its end are empty."""
        texts = [cell if isinstance(cell, Text) else Text(cell) for cell in cells]
        self.rows.append(texts + [Text()] * (len(self.columns) - len(texts)))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the table, the records or the plain lines."""
        if not console.is_terminal:
            yield from self._plain_lines()
            return
        widths = self._widths(options.max_width)
        if widths is not None:
            yield self._table(widths)
            return
        if self.title:
            yield from (self.title, Text())
        yield from self._records("fold")

    def _widths(self, room: int) -> list[int] | None:
        """Return the column widths of a table in `room` columns; None if it is hard to read."""
        cells = [self._column(n) for n in range(len(self.columns))]
        natural = [max(map(_width, column)) for column in cells]
        least = [
            whole if self.columns[n].no_wrap else max(map(_longest_word, cells[n]))
            for n, whole in enumerate(natural)
        ]
        excess = sum(natural) + PADDING * len(natural) - room
        widths = list(natural)
        while excess > 0:
            slack = [width - floor for width, floor in zip(widths, least, strict=True)]
            widest = max(range(len(widths)), key=lambda n: (slack[n] > 0, widths[n]))
            if slack[widest] <= 0:
                return None
            widths[widest] -= 1
            excess -= 1
        broken = (_lines(text, widths[n]) for n, column in enumerate(cells) for text in column)
        return widths if all(lines <= LINES for lines in broken) else None

    def _column(self, number: int) -> list[Text]:
        return [Text(_head(self.columns[number])), *(row[number] for row in self.rows)]

    def _table(self, widths: Sequence[int]) -> Table:
        columns = [
            Column(
                Text(_head(c)),
                justify=c.justify,
                no_wrap=c.no_wrap,
                overflow="fold",
                width=width,
            )
            for c, width in zip(self.columns, widths, strict=True)
        ]
        title = self.title or None
        table = Table(
            *columns,
            title=title,
            title_justify="left",
            box=SIMPLE_HEAD,
            show_edge=False,
            padding=(0, 1, 0, 0),
        )
        for row in self.rows:
            table.add_row(*row)
        return table

    def _plain_lines(self) -> Iterator[Text]:
        if self.title:
            yield self.title
        cells = [self._column(n) for n in range(len(self.columns))]
        widths = [max(map(_width, column)) for column in cells]
        single_lines = all(text.plain.count("\n") == 0 for column in cells for text in column)
        if not single_lines or sum(widths) > PLAIN_WIDTH:
            yield from self._records("ignore")
            return
        for row in zip(*cells, strict=True):
            line = Text("  ").join(
                _align(text, width, self.columns[n].justify == "right")
                for n, (text, width) in enumerate(zip(row, widths, strict=True))
            )
            line.rstrip()
            yield _forbid_wrapping(line)

    def _records(self, overflow: Any) -> Iterator[Text]:
        for number, row in enumerate(self.rows):
            if number:
                yield Text()
            for column, cell in zip(self.columns, row, strict=True):
                lines = [line for line in cell.split("\n") if line.plain]
                head = _head(column).replace("\n", " ")
                if head and len(lines) == 1:
                    lines = [Text.assemble((f"{head}: ", "bold"), lines[0])]
                elif head and lines:
                    lines = [Text(f"{head}:", "bold"), *(Text("  ").append_text(x) for x in lines)]
                for line in lines:
                    yield line if overflow == "fold" else _forbid_wrapping(line)


def show(console: Console, *parts: Any) -> None:
    """Print strings, listings and other renderables; outside a terminal no text is cut."""
    for part in parts:
        text = Text(part) if isinstance(part, str) else part
        console.print(text, soft_wrap=isinstance(part, str) or not console.is_terminal)


def _head(column: Column) -> str:
    return str(column.header)


def _width(text: Text) -> int:
    return max(map(cell_len, text.plain.split("\n")))


def _longest_word(text: Text) -> int:
    return max(map(cell_len, text.plain.split()), default=0)


def _lines(text: Text, width: int) -> int:
    """Return about how many lines `text` takes in `width` columns, its own line breaks included."""
    return max(-(-cell_len(line) // max(width, 1)) for line in text.plain.split("\n"))


def _align(text: Text, width: int, right: bool) -> Text:
    padded, space = text.copy(), width - _width(text)
    if right:
        padded.pad_left(space)
    else:
        padded.pad_right(space)
    return padded


def _forbid_wrapping(line: Text) -> Text:
    line.no_wrap, line.overflow = True, "ignore"
    return line
