"""Machine code for NVIDIA GPUs, loaded and launched by the driver: no Triton, no compiler."""

import ctypes
import functools
import threading
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

from ipex_inductor.aot_cache.entry import Entry
from ipex_inductor.errors import DeviceError

C_VALUES = {"fp32": ctypes.c_float, "fp64": ctypes.c_double, "i32": ctypes.c_int32}
SCRATCH = 2  # extra pointers after the arguments of Triton's kernels; null, as ours need none
WARP = 32


class Launch(NamedTuple):
    """A launch that `Reader.check_and_count` repeats with new numbers while this object exists."""

    stream: int
    tables: tuple[int, ...]
    fields: dict[str, int]  # of a `Turn`
    kept: tuple[Any, ...]  # the arguments, with adjacent numbers, and the kernel: kept alive


class Kernel:
    """A kernel in the current context. Raises `DeviceError` for errors of the driver."""

    def __init__(self, entry: Entry) -> None:
        module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        self._blob = entry.blob
        _call("cuModuleLoadData", ctypes.byref(module), self._blob)
        name = str(entry.meta["name"]).encode()
        _call("cuModuleGetFunction", ctypes.byref(self._function), module, name)
        kinds = [C_VALUES.get(kind, ctypes.c_uint64) for kind in entry.meta["signature"]]
        self._kinds: list[Any] = [*kinds, *[ctypes.c_uint64] * SCRATCH]
        self._values, self._pointers = _room(self._kinds)
        self._block = WARP * entry.meta["num_warps"]
        self._shared = entry.meta["shared"]
        self._stream = ctypes.c_void_p()
        self._launch = _driver().cuLaunchKernel
        self._lock = threading.Lock()  # of the arguments, until the driver has copied them

    def __call__(self, blocks: int, stream: int, arguments: Sequence[float]) -> None:
        """Launch `blocks` programs on a stream; the driver copies the arguments at once."""
        with self._lock:
            for value, argument in zip(self._values, arguments, strict=False):
                value.value = argument
            block, shared, pointers = self._block, self._shared, self._pointers
            self._stream.value = stream
            status = self._launch(
                self._function, blocks, 1, 1, block, 1, 1, shared, self._stream, pointers, None
            )
        if status:
            raise_launch(status)

    def launch(self, blocks: int, stream: int, tables: tuple[int, ...], numbers: int) -> Launch:
        """Return the launch of `blocks` programs with `tables` and `numbers` numbers of one dtype.

        Args:
            blocks: the number of programs.
            stream: the address of the stream.
            tables: the addresses that are the first arguments.
            numbers: how many numbers follow them, adjacent in memory.
        """
        values, pointers = _room(self._kinds)
        for value, table in zip(values, tables, strict=False):
            value.value = table
        wide = numbers > 0 and self._kinds[len(tables)] is C_VALUES["fp64"]
        number_array = array("d" if wide else "f", [0.0] * numbers)
        first, _ = number_array.buffer_info()
        for n in range(numbers):
            pointers[len(tables) + n] = first + n * number_array.itemsize
        fields = {
            "driver": ctypes.cast(self._launch, ctypes.c_void_p).value or 0,
            "function": self._function.value or 0,
            "stream": stream,
            "arguments": ctypes.addressof(pointers),
            "blocks": blocks,
            "threads": self._block,
            "shared": self._shared,
            "numbers": first,
            "each": numbers,
            "doubles": int(wide),
        }
        return Launch(stream, tables, fields, (values, pointers, number_array, self))


def _room(kinds: Sequence[Any]) -> tuple[list[Any], Any]:
    """Return storage for arguments of these types, and the array of its addresses."""
    values = [kind() for kind in kinds]
    return values, (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))


def _call(name: str, *arguments: object) -> None:
    status = getattr(_driver(), name)(*arguments)
    if status:
        _raise(name, status)


def raise_launch(status: int) -> None:
    """Raise `DeviceError` for the driver's status of a launch."""
    _raise("cuLaunchKernel", status)


def _raise(name: str, status: int) -> None:
    text = ctypes.c_char_p()
    _driver().cuGetErrorString(status, ctypes.byref(text))
    description = (text.value or b"").decode() or f"error {status}"
    raise DeviceError("a kernel that the device runs", f"{name}: {description}", "Report it.")


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
