"""Facts about hundreds of tensors in one call of C++, which Python would ask for one by one.

And the steps they count, which lie in as many places.
"""

import ctypes
import functools
import sys
from array import array
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ipex_inductor.aot_cache.key import pairs
from ipex_inductor.templates.cpp import NotBuiltError, load

ASKED = ("data_ptr", "dtype", "layout", "dim", "sizes", "strides")  # `Torch`, in its order
GRAD = sys.intern("grad")
WORD = ctypes.sizeof(ctypes.c_void_p)
IMPL_WORDS = 24  # of a TensorImpl, at least
CELLS = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_double)


class Reader:
    """The library. Raises `NotBuiltError`."""

    def __init__(self) -> None:
        if not getattr(sys, "_is_gil_enabled", lambda: True)():
            raise NotBuiltError("this Python has no lock that keeps dicts as they are")
        source = Path(__file__).with_name("look.cpp").read_text
        library = load(source, pairs({"template": "look"}), portable=True)
        try:
            theirs = ctypes.CDLL(torch._C.__file__)  # and what it is linked with
            asked = [address_of(getattr(theirs, f"aoti_torch_get_{name}")) for name in ASKED]
            strided = theirs.aoti_torch_layout_strided()
        except (AttributeError, OSError) as error:
            raise NotBuiltError(f"torch's C interface is not to be had: {error}") from error
        self._torch = array("q", asked)
        known = map(id, (None, Tensor, nn.Parameter, GRAD))
        self._words = array("q", (*known, strided, place_of_impl(), *_negative_key()))
        self._places = [each.buffer_info()[0] for each in (self._torch, self._words)]
        pointer, thing = ctypes.c_void_p, ctypes.py_object
        prototype = ctypes.PYFUNCTYPE(ctypes.c_int32, pointer, pointer, *[thing] * 6)
        self._look = prototype(address_of(library.look))  # holds Python's lock
        self._are, self._become = library.are, library.become
        self._are.argtypes = self._become.argtypes = CELLS
        self._become.restype = None
        self._library = library

    def look(
        self,
        groups: list[list[Tensor]],
        names: list[tuple[str, ...]],
        state: dict[Tensor, Any],
        held: list[Tensor],
        grads: list[Tensor],
    ) -> "tuple[bytes, array[int]] | None":
        """Read groups of parameters with their gradients, of each that has one the states by name.

        Adds them to `held` and `grads`. What was read, and the addresses of gradients, of which it
        does not tell: types, dtypes, sizes, strides and addresses; of a gradient only what a vector
        needs. None for what is no plain tensor of plain memory, or a gradient that is negated when
        it is read, or not there.
        """
        told: list[bytes] = []
        if not self._look(*self._places, groups, names, state, held, grads, told):
            return None
        facts, addresses = told
        return facts, array("q", addresses)

    def are(self, cells: "array[int]", wide: bool, value: float) -> bool:
        """Whether that is the number at each of these addresses: fp32, or `wide`, fp64."""
        return bool(self._are(*cells.buffer_info(), wide, value))

    def become(self, cells: "array[int]", wide: bool, value: float) -> None:
        """Write it there."""
        self._become(*cells.buffer_info(), wide, value)


def place_of_impl() -> int:
    """Bytes from the begin of a tensor's object to the address that `_cdata` takes longer to say.

    It is found by looking, as no header tells. Raises `NotBuiltError`.
    """
    seen = [torch.empty(n, device="cpu") for n in range(4)]
    seen += [nn.Parameter(tensor) for tensor in seen]

    def stands(place: int) -> bool:
        found = (ctypes.c_void_p.from_address(id(t) + WORD * place).value for t in seen)
        return all(one == t._cdata for one, t in zip(found, seen, strict=True))

    words = vars(torch._C)["TensorBase"].__basicsize__ // WORD
    places = [WORD * place for place in range(2, words) if stands(place)]  # two are Python's own
    if len(places) != 1:
        raise NotBuiltError("a tensor's object does not hold its TensorImpl where it did")
    return places[0]


def _negative_key() -> tuple[int, int]:
    """Which word of a TensorImpl holds the dispatch keys, and the bit that negates what is read.

    It is found by looking, as no header tells. Raises `NotBuiltError`.
    """
    plain = [torch.empty((n + 1,) * n, device="cpu") for n in range(6)]
    turned = [torch._neg_view(tensor) for tensor in plain]
    found = []
    for place in range(2, IMPL_WORDS):  # one is virtual functions', one counts references
        ours, theirs = ({_word(t, place) for t in each} for each in (plain, turned))
        (bit, *more) = {one ^ other for one in ours for other in theirs}
        if len(ours) == len(theirs) == 1 and not more and bit.bit_count() == 1:
            found += [(place, bit)] if theirs.pop() & bit else []
    if len(found) != 1:
        raise NotBuiltError("a TensorImpl does not hold its dispatch keys where it did")
    return found[0]


def _word(tensor: Tensor, place: int) -> int:
    return ctypes.c_int64.from_address(tensor._cdata + WORD * place).value


def address_of(function: Any) -> int:
    """Where a function of a library lies."""
    return ctypes.cast(function, ctypes.c_void_p).value or 0


@functools.cache
def reader() -> Reader | str:
    """The library, or why there is none."""
    try:
        return Reader()
    except NotBuiltError as error:
        return str(error)
