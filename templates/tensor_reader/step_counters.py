"""Step counters kept by the host, one a tensor, and the launches that read them."""

import ctypes
from array import array
from typing import Any

from ipex_inductor.templates.tensor_reader.look_cpp import Reader, reader

DTYPES: dict[str, Any] = {"float32": ctypes.c_float, "float64": ctypes.c_double}
_PLACES = ("driver", "function", "stream", "arguments")
_SIZES = ("blocks", "threads", "shared")
_NUMBERS = ("numbers", "each", "doubles", "ahead", "left")


def is_whole(far: float) -> bool:
    """Return whether a step count is a whole number that fp64 holds exactly (below 2^53)."""
    return far.is_integer() and abs(far) < 2**53


class Turn(ctypes.Structure):
    """`Turn` of look.cpp: cells at the count `far`, and a launch with numbers known `ahead`."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("cells", "count", "wide")),
        ("far", ctypes.c_double),
        *((name, ctypes.c_int64) for name in (*_PLACES, *_SIZES, *_NUMBERS)),
        ("at", ctypes.c_double),
        *((name, ctypes.c_int64) for name in ("kept", "busy")),
    )


class Cells:
    """Step counters of one dtype, all at the count `far`, read and written together.

    By C++ if it can be built; then also in turns that `Reader.check_and_count` launches.
    """

    def __init__(self, dtype: str, far: float = 0.0) -> None:
        self._addresses = array("q")
        self._type = DTYPES.get(dtype)
        self.turn = Turn(far=far, wide=dtype == "float64")
        library = reader()
        self._reader = library if isinstance(library, Reader) else None

    def __len__(self) -> int:
        return len(self._addresses)

    @property
    def far(self) -> float:
        """Return the count in each cell, as it was last written here."""
        return float(self.turn.far)

    def add(self, address: int) -> None:
        """Add the cell at an address, which must exist as long as this object."""
        self._addresses.append(address)
        self.turn.cells, self.turn.count = self._addresses.buffer_info()

    def stand(self) -> bool:
        """Return whether all cells still hold the count `far`."""
        if self._reader is not None:
            return self._reader.are(self._addresses, self.turn.wide, self.far)
        return all(cell.value == self.far for cell in self._each())

    def become(self, far: float) -> None:
        """Write a count to all cells."""
        self.turn.far = far
        if self._reader is not None:
            self._reader.become(self._addresses, self.turn.wide, far)
            return
        for cell in self._each():
            cell.value = far

    def after(self) -> float:
        """Return the count after the next step; 0.0 without cells."""
        return self.far + 1 if self._addresses else 0.0

    def _each(self) -> list[Any]:
        assert self._type is not None or not self._addresses
        return [self._type.from_address(a) for a in self._addresses] if self._type else []
