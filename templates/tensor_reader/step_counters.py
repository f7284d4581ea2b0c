"""Steps that the host counts, of which each tensor has one, and what is launched by them."""

import ctypes
from array import array
from typing import Any

from ipex_inductor.templates.tensor_reader.look_cpp import Reader, reader

DTYPES: dict[str, Any] = {"float32": ctypes.c_float, "float64": ctypes.c_double}
_PLACES = ("driver", "function", "stream", "arguments")
_SIZES = ("blocks", "threads", "shared")
_NUMBERS = ("numbers", "each", "doubles", "ahead", "left")


def is_whole(far: float) -> bool:
    """Whether so many steps are a whole number, as tables of GPUs have it."""
    return far.is_integer() and abs(far) < 2**53


class Turn(ctypes.Structure):
    """`Turn` of look.cpp: cells that are as `far`, and a launch whose numbers are known `ahead`."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("cells", "count", "wide")),
        ("far", ctypes.c_double),
        *((name, ctypes.c_int64) for name in (*_PLACES, *_SIZES, *_NUMBERS)),
        ("at", ctypes.c_double),
        *((name, ctypes.c_int64) for name in ("kept", "busy")),
    )


class Cells:
    """Cells of one of these dtypes, all as `far`, read and written all at once.

    By C++ where it can be had, also in turns that `Reader.again` takes.
    """

    def __init__(self, dtype: str, far: float = 0.0) -> None:
        self._addresses = array("q")
        self._type = DTYPES.get(dtype)
        self.turn = Turn(far=far, wide=dtype == "float64")
        found = reader()
        self._reader = found if isinstance(found, Reader) else None

    def __len__(self) -> int:
        return len(self._addresses)

    @property
    def far(self) -> float:
        """The number in each of them, as it was left here."""
        return float(self.turn.far)

    def add(self, address: int) -> None:
        """One more, which is there as long as this."""
        self._addresses.append(address)
        self.turn.cells, self.turn.count = self._addresses.buffer_info()

    def stand(self) -> bool:
        """Whether all are still as far."""
        if self._reader is not None:
            return self._reader.are(self._addresses, self.turn.wide, self.far)
        return all(cell.value == self.far for cell in self._each())

    def become(self, far: float) -> None:
        """Write it to all."""
        self.turn.far = far
        if self._reader is not None:
            self._reader.become(self._addresses, self.turn.wide, far)
            return
        for cell in self._each():
            cell.value = far

    def after(self) -> float:
        """Where they are after a step; where none are, whether there was none before."""
        return self.far + 1 if self._addresses else 0.0

    def _each(self) -> list[Any]:
        assert self._type is not None or not self._addresses
        return [self._type.from_address(a) for a in self._addresses] if self._type else []
