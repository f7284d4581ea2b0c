"""Table of an update's rows, whose addresses and numbers are filled in at each call."""

import struct
from array import array
from collections.abc import Sequence

from torch import Tensor

from ipex_inductor.ops.optimizer.update import HostScalar, Row
from ipex_inductor.templates.optimizer.step_cpp import CHUNK, Table


class Rows:
    """Table with a row for each tensor, in chunks for C++ or SYCL.

    `numbers` holds the numbers of all groups, one group after the other.
    """

    def __init__(self, rows: Sequence[Row], examples: Sequence[Tensor], chunk: int = CHUNK) -> None:
        self.table = Table(chunk)
        self._places: list[
            tuple[int, int]
        ] = []  # place in the rows, and the operand of the address
        groups: dict[tuple[float | HostScalar, ...], int] = {}
        for row in rows:
            columns = row.columns if row.step is None else (*row.columns, row.step)
            begin = len(self.table.rows)
            self._places += [(begin + place, n) for place, n in enumerate(columns)]
            group = groups.setdefault(row.numbers, len(groups))
            # Addresses, the step's address and the group, in the template's order.
            self.table.add((*(0 for _ in row.columns), 0, group), examples[row.columns[0]].numel())
        self.numbers = [n for group in groups for n in group]

    def at(self, addresses: Sequence[int]) -> "array[int]":
        """Return all rows, for operands at these addresses."""
        rows = array("q", self.table.rows)
        for place, operand in self._places:
            rows[place] = addresses[operand]
        return rows


def bits(number: float) -> int:
    """Return the bits of an fp64 number as the integer word of a table."""
    (word,) = struct.unpack("q", struct.pack("d", number))
    return int(word)
