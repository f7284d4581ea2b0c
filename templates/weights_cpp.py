"""Identities, versions and addresses of hundreds of weights in one call of C++."""

import ctypes
import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ipex_inductor.aot_cache.key import pairs
from ipex_inductor.templates import fields
from ipex_inductor.templates.cpp import NotBuiltError, load
from ipex_inductor.templates.fields import WORD
from ipex_inductor.templates.look_cpp import address_of

Same = Callable[[list[Any], bytes], int]  # inputs of a graph, and what `read` said


@dataclass(frozen=True)
class Reader:
    """Reads in C++. `read`: of a tuple of tensors three blocks of int64, a number a tensor in each.

    No bytes where a tensor has no version or no address.
    """

    read: Callable[[tuple[torch.Tensor, ...]], bytes]
    _same: Callable[..., int]

    def same(self, numbers: Sequence[int]) -> Same:
        """Whether the inputs with these numbers are as `read` said: compared, and not written."""
        array = (ctypes.c_int64 * len(numbers))(*numbers)
        return functools.partial(self._same, array, len(numbers))


@functools.cache
def reader() -> Reader | None:
    """None: it cannot be built here, or does not say what torch says."""
    try:
        return _reader()
    except NotBuiltError:
        return None


def _reader() -> Reader:
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        raise NotBuiltError("this Python has no lock that keeps objects as they are")
    source = Path(__file__).with_name("weights.cpp").read_text
    library = load(source, pairs({"template": "weights"}), portable=True)
    pointer, thing, number = ctypes.c_void_p, ctypes.py_object, ctypes.c_int64
    known = _places()  # which lives as long as the functions that are given it
    read = ctypes.PYFUNCTYPE(thing, pointer, thing)  # holds Python's lock
    same = ctypes.PYFUNCTYPE(ctypes.c_int, pointer, pointer, number, thing, thing)
    found = Reader(
        functools.partial(read(address_of(library.state)), ctypes.byref(known)),
        functools.partial(same(address_of(library.same)), ctypes.byref(known)),
    )
    _check(found)
    return found


class _Places(ctypes.Structure):
    """Of C++ a `Places`."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("impl", "version", "storage", "offset", "dtype")),
        *(("number", ctypes.c_int64), ("data", ctypes.c_int64)),
        ("sizes", ctypes.c_int8 * 256),
    )


def _places() -> _Places:
    version, number = fields.version()
    storage, offset, data = fields.storage()
    dtype = fields.dtype()
    words = (WORD * word for word in (version, storage, offset, dtype))
    sizes = (ctypes.c_int8 * 256)(*fields.sizes(dtype))
    return _Places(fields.place_of_impl(), *words, number, WORD * data, sizes)


def _check(found: Reader) -> None:
    """Compare with what torch says of tensors of several kinds, each of its own version."""
    with torch.inference_mode(False), torch.no_grad():
        base = torch.zeros(8, device="cpu")
        kinds = [base[2:], torch.nn.Parameter(base.clone()), torch.zeros(0, device="cpu")]
        for number, tensor in enumerate(kinds):
            for _ in range(3 * number + 1):
                tensor.add_(1)
        tensors = (*kinds, base)
    told = found.read(tensors)
    facts = map(id, tensors), (t._version for t in tensors), (t.data_ptr() for t in tensors)
    right = [*memoryview(told).cast("q")] == [number for block in facts for number in block]
    if not (right and found.same(range(len(tensors)))([*tensors], told)):
        raise NotBuiltError("a tensor's version or address is not where it was")
