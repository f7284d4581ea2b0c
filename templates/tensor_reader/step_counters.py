"""Step counters kept by the host, one a tensor, and the launches that read them."""

import ctypes
from array import array
from typing import Any

from ipex_inductor.templates.tensor_reader.look_cpp import Reader, reader

DTYPES: dict[str, Any] = {"float32": ctypes.c_float, "float64": ctypes.c_double}
_PLACES = ("driver", "function", "stream", "arguments")
_SIZES = ("blocks", "threads", "shared")
_NUMBERS = ("numbers", "each", "doubles", "ahead", "left")


def is_whole(steps: float) -> bool:
    """Return whether a step count is a whole number that fp64 holds exactly (below 2^53)."""
    return steps.is_integer() and abs(steps) < 2**53


class Turn(ctypes.Structure):
    """`Turn` of look.cpp: one launch that C++ may repeat, and the step counters of its parameters.

    `far` is the number of steps taken, which all of its `cells` hold. `ahead` is the address of
    precomputed numbers, of which those of `left` steps remain, the first after step `at`.
    """

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("cells", "count", "wide")),
        ("far", ctypes.c_double),
        *((name, ctypes.c_int64) for name in (*_PLACES, *_SIZES, *_NUMBERS)),
        ("at", ctypes.c_double),
        *((name, ctypes.c_int64) for name in ("kept", "busy")),
    )


class Cells:
    """Step counters of one dtype, which all hold the same number of `steps`.

    They are read and written together, by C++ if it can be built; `Reader.check_and_count` then
    counts in them too, by `turn`.
    """

    def __init__(self, dtype: str, steps: float = 0.0) -> None:
        self._addresses = array("q")
        self._type = DTYPES.get(dtype)
        self.turn = Turn(far=steps, wide=dtype == "float64")
        library = reader()
        self._reader = library if isinstance(library, Reader) else None

    def __len__(self) -> int:
        return len(self._addresses)

    @property
    def steps(self) -> float:
        """Return the count in each cell, as it was last written here."""
        return float(self.turn.far)

    def add(self, address: int) -> None:
        """Add the cell at an address, which must exist as long as this object."""
        self._addresses.append(address)
        self.turn.cells, self.turn.count = self._addresses.buffer_info()

    def are_unchanged(self) -> bool:
        """Return whether all cells still hold `steps`."""
        if self._reader is not None:
            return self._reader.are(self._addresses, self.turn.wide, self.steps)
        return all(cell.value == self.steps for cell in self._each())

    def write(self, steps: float) -> None:
        """Write a count to all cells."""
        self.turn.far = steps
        if self._reader is not None:
            self._reader.become(self._addresses, self.turn.wide, steps)
            return
        for cell in self._each():
            cell.value = steps

    def next_steps(self) -> float:
        """Return the count after the next step; 0.0 without cells."""
        return self.steps + 1 if self._addresses else 0.0

    def _each(self) -> list[Any]:
        assert self._type is not None or not self._addresses
        return [self._type.from_address(a) for a in self._addresses] if self._type else []
