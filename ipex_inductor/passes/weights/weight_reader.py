"""Read and compare weights in Python, where the C++ library cannot be built."""

import ctypes
import functools
import zlib
from array import array
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch

from ipex_inductor import compat
from ipex_inductor.templates.tensor_reader import freed
from ipex_inductor.templates.tensor_reader.weights_cpp import (
    FACTS,
    SAME,
    Changed,
    Contents,
    Hashes,
    Owner,
    Reader,
    reader,
)

CHUNK = 1 << 16  # bytes that share a checksum; one is compared a call
UNKNOWN = 2  # tensors that share a version counter, if they cannot be counted
_version = attrgetter("_version")


class PythonReader:
    """The functions of `Reader`, one weight at a time: some 0.1 microseconds each."""

    allocator = 0

    def read(self, weights: Sequence[torch.Tensor]) -> bytes:
        """Return identities, versions (-1: inference tensor) and addresses, one block of each."""
        try:
            versions = list(map(_version, weights))
        except RuntimeError:
            versions = [-1 if w.is_inference() else w._version for w in weights]
        address = freed.address if freed.any_is() else torch.Tensor.data_ptr
        try:
            return array("q", [*map(id, weights), *versions, *map(address, weights)]).tobytes()
        except RuntimeError:  # no plain storage
            return b""

    def owners(self, tensors: Sequence[torch.Tensor]) -> list[Owner]:
        """Return the storage of each tensor; the other fields of `Owner` are unknown."""
        return [Owner(0, _storage(tensor), 0) for tensor in tensors]

    def counters(self, tensors: tuple[torch.Tensor, ...]) -> bytes:
        """Return the version of each tensor; how many share its counter is unknown."""
        return array("q", [*map(_version, tensors), *[UNKNOWN] * len(tensors)]).tobytes()

    def storage_of(self, tensor: torch.Tensor) -> int:
        """Return the address of a tensor's storage, 0 if it has none."""
        with torch._C.DisableTorchFunction():
            return _storage(tensor)

    def make_comparer(self, numbers: Sequence[int]) -> Changed:
        """Return a function that compares weights, as `Reader.make_comparer` does.

        It compares one chunk of contents a call.
        """
        position = 0

        def compare(inputs: list[Any], read: bytes, contents: Contents | None) -> int:
            nonlocal position
            if self.read([inputs[number] for number in numbers]) != read:
                return FACTS
            chunks = _chunks(contents.weights if contents else ())
            if not chunks:
                return SAME
            position = (position + 1) % len(chunks)
            weight, hashes, chunk = chunks[position]
            return SAME if _checksum(hashes, chunk) == _word(hashes, chunk) else weight

        return compare

    def hashes(self, address: int, size: int) -> Hashes:
        """Return the contents of `size` bytes of this process's memory."""
        empty = Hashes(address, size, b"")
        sums = (_checksum(empty, chunk) for chunk in range(-(-size // CHUNK)))
        return Hashes(address, size, b"".join(s.to_bytes(4, "little") for s in sums))


AnyReader = Reader | PythonReader
_by_python = PythonReader()


def any_reader() -> AnyReader:
    """Return the C++ reader if it can be built, else the Python one."""
    return reader() or _by_python


@functools.lru_cache(maxsize=8)
def _chunks(weights: tuple[Hashes | None, ...]) -> list[tuple[int, Hashes, int]]:
    return [
        (number, hashes, chunk)
        for number, hashes in enumerate(weights)
        if hashes
        for chunk in range(-(-hashes.size // CHUNK))
    ]


def _checksum(hashes: Hashes, chunk: int) -> int:
    begin = chunk * CHUNK
    count = min(CHUNK, hashes.size - begin)
    return zlib.crc32((ctypes.c_char * count).from_address(hashes.address + begin))


def _word(hashes: Hashes, chunk: int) -> int:
    return int.from_bytes(hashes.words[4 * chunk : 4 * chunk + 4], "little")


def _storage(tensor: torch.Tensor) -> int:
    try:
        return int(compat.open_storage(tensor)._cdata)
    except Exception:  # no storage of its own; a subclass may raise anything
        return 0
