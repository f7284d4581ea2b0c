"""Identities, versions and addresses of hundreds of weights in one call of C++."""

import ctypes
import functools
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from ipex_inductor.aot_cache.key import pairs
from ipex_inductor.templates.cpp import NotBuiltError, load
from ipex_inductor.templates.look_cpp import address_of, place_of_impl

VERSION = "_ZNK2at10TensorBase8_versionEv"  # at::TensorBase::_version() const

Read = Callable[[tuple[torch.Tensor, ...]], bytes]


@functools.cache
def reader() -> Read | None:
    """What reads a tuple of tensors: three blocks of int64, a number a tensor in each of them.

    No bytes where a tensor has no version or no address. None: it cannot be built here, or does not
    say what torch says.
    """
    try:
        return _reader()
    except NotBuiltError:
        return None


def _reader() -> Read:
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        raise NotBuiltError("this Python has no lock that keeps objects as they are")
    source = Path(__file__).with_name("weights.cpp").read_text
    library = load(source, pairs({"template": "weights"}), portable=True)
    try:
        theirs = ctypes.CDLL(torch._C.__file__)  # and what it is linked with
        asked = getattr(theirs, VERSION), theirs.aoti_torch_get_data_ptr
    except (AttributeError, OSError) as error:
        raise NotBuiltError(f"torch does not have what it had: {error}") from error
    pointer, thing = ctypes.c_void_p, ctypes.py_object
    prototype = ctypes.PYFUNCTYPE(thing, pointer, pointer, ctypes.c_int64, thing)
    state = prototype(address_of(library.state))  # holds Python's lock
    read = functools.partial(state, *map(address_of, asked), place_of_impl())
    _check(read)
    return read


def _check(read: Read) -> None:
    """Compare with what torch says of tensors of several kinds, each of its own version."""
    with torch.inference_mode(False), torch.no_grad():
        base = torch.zeros(8, device="cpu")
        kinds = [base[2:], torch.nn.Parameter(base.clone()), torch.zeros(0, device="cpu")]
        for number, tensor in enumerate(kinds):
            for _ in range(3 * number + 1):
                tensor.add_(1)
        tensors = (*kinds, base)
    told = list(memoryview(read(tensors)).cast("q"))
    facts = map(id, tensors), (t._version for t in tensors), (t.data_ptr() for t in tensors)
    if told != [number for block in facts for number in block]:
        raise NotBuiltError("a tensor's version or address is not where it was")
