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
from ipex_inductor.templates.cpp import NotBuiltError, load
from ipex_inductor.templates.look_cpp import address_of, place_of_impl

VERSION = "_ZNK2at10TensorBase8_versionEv"  # at::TensorBase::_version() const

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
    try:
        theirs = ctypes.CDLL(torch._C.__file__)  # and what it is linked with
        asked = getattr(theirs, VERSION), theirs.aoti_torch_get_data_ptr
    except (AttributeError, OSError) as error:
        raise NotBuiltError(f"torch does not have what it had: {error}") from error
    pointer, thing, number = ctypes.c_void_p, ctypes.py_object, ctypes.c_int64
    # Of C++ a `Torch`, which lives as long as the functions that are given it.
    known = (number * 3)(*map(address_of, asked), place_of_impl())
    read = ctypes.PYFUNCTYPE(thing, pointer, thing)  # holds Python's lock
    same = ctypes.PYFUNCTYPE(ctypes.c_int, pointer, pointer, number, thing, thing)
    found = Reader(
        functools.partial(read(address_of(library.state)), known),
        functools.partial(same(address_of(library.same)), known),
    )
    _check(found)
    return found


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
