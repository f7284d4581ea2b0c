"""Numbers that lie all over the host's memory: steps, of which each tensor has one."""

import ctypes
import struct
from array import array
from typing import Any

from ipex_inductor.templates.look_cpp import Reader, reader

CELLS = struct.Struct("qqqd")  # `Cells` of look.cpp
DTYPES: dict[str, Any] = {"float32": ctypes.c_float, "float64": ctypes.c_double}


class Cells:
    """Cells of one of these dtypes, read and written all at once; by C++ where it can be had."""

    def __init__(self, dtype: str) -> None:
        self._addresses = array("q")
        self._wide, self._type = dtype == "float64", DTYPES.get(dtype)
        found = reader()
        self._reader = found if isinstance(found, Reader) else None

    def __len__(self) -> int:
        return len(self._addresses)

    def add(self, address: int) -> None:
        """One more, which is there as long as this."""
        self._addresses.append(address)

    def are(self, value: float) -> bool:
        """Whether all are equal to that."""
        if self._reader is not None:
            return self._reader.are(self._addresses, self._wide, value)
        return all(cell.value == value for cell in self._each())

    def standing(self, value: float) -> bytes:
        """The same question, for `Reader.again` to ask as long as this is there."""
        return CELLS.pack(*self._addresses.buffer_info(), self._wide, value)

    def become(self, value: float) -> None:
        """Write it to all."""
        if self._reader is not None:
            self._reader.become(self._addresses, self._wide, value)
            return
        for cell in self._each():
            cell.value = value

    def _each(self) -> list[Any]:
        assert self._type is not None or not self._addresses
        return [self._type.from_address(a) for a in self._addresses] if self._type else []
