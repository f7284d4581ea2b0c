"""Facts about hundreds of tensors in one call of C++, which Python would ask for one by one.

And the steps they count, which lie in as many places.
"""

import ctypes
import functools
import sys
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ipex_inductor.aot_cache.key import pairs
from ipex_inductor.templates.build.cpp import NotBuiltError, load
from ipex_inductor.templates.build.cuda import raise_launch
from ipex_inductor.templates.tensor_reader import fields

GRADIENT = "_ZNK3c1010TensorImpl4gradEv"  # c10::TensorImpl::grad() const
# torch::autograd::impl::bump_version(const at::Tensor&)
BUMP = "_ZN5torch8autograd4impl12bump_versionERKN2at6TensorE"
# `Torch`, in its order: its stable C interface, and what else it exports, tried before it is used.
ASKED = (
    *("aoti_torch_get_data_ptr", "aoti_torch_get_layout"),
    *("aoti_torch_assign_tensors", GRADIENT),
)
GRAD = sys.intern("grad")
_CELLS = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_double)


class Seen(NamedTuple):
    """What was read: types, dtypes, sizes, strides, addresses; of a gradient what a vector needs.

    `facts` are bytes, those that were `known`, if they are the same. `held` are parameters that
    have a gradient, and then states; `gradients` stay in memory as long as what is here for them.
    """

    facts: bytes
    addresses: "array[int]"  # of gradients
    held: list[Tensor]
    gradients: object


class Reader:
    """The library. Raises `NotBuiltError`."""

    def __init__(self) -> None:
        if not getattr(sys, "_is_gil_enabled", lambda: True)():
            raise NotBuiltError("this Python has no lock that keeps dicts as they are")
        source = Path(__file__).with_name("look.cpp").read_text
        library = load(source, pairs({"template": "look"}), portable=True)
        try:
            theirs = ctypes.CDLL(torch._C.__file__)  # and what it is linked with
            asked = [address_of(getattr(theirs, name)) for name in ASKED]
            strided = theirs.aoti_torch_layout_strided()
        except (AttributeError, OSError) as error:
            raise NotBuiltError(f"torch's C interface is not to be had: {error}") from error
        self._torch = array("q", (*asked, address_of(getattr(theirs, BUMP, 0))))
        known = map(id, (None, Tensor, nn.Parameter, GRAD))
        where = fields.place_of_impl(), *fields.negative_key(), fields.python_object(theirs)
        found = *where, _undefined(theirs), fields.dtype(), fields.dimensions()
        self._words = array("q", (*known, strided, *found))
        self._places = [each.buffer_info()[0] for each in (self._torch, self._words)]
        pointer, thing = ctypes.c_void_p, ctypes.py_object
        prototype = ctypes.PYFUNCTYPE(ctypes.c_int32, pointer, pointer, *[thing] * 6)
        self._look = prototype(address_of(library.look))  # holds Python's lock
        prototype = ctypes.PYFUNCTYPE(ctypes.c_int32, pointer, pointer, *[thing] * 9)
        self._again = prototype(address_of(library.again))
        prototype = ctypes.PYFUNCTYPE(ctypes.c_int32, pointer, pointer, *[thing] * 3)
        self._tell = prototype(address_of(library.tell))
        prototype = ctypes.PYFUNCTYPE(ctypes.c_int64, pointer, pointer, thing)
        bump = functools.partial(prototype(address_of(library.bump)), *self._places)
        self._bump = bump if self._torch[-1] and _bumps(bump) else None
        self._are, self._become = library.are, library.become
        self._are.argtypes = self._become.argtypes = _CELLS
        self._become.restype = None
        self._library = library

    def look(
        self,
        groups: list[list[nn.Parameter]],
        names: list[tuple[str, ...]],
        state: dict[Tensor, Any],
        known: bytes,
    ) -> Seen | None:
        """Read groups of parameters with their gradients, of each that has one the states by name.

        None for what is no plain tensor of plain memory, or a gradient that is negated when it is
        read, or a state that is not there.
        """
        held: list[Tensor] = []
        told: list[Any] = []
        if not self._look(*self._places, groups, names, state, known, held, told):
            return None
        facts, addresses, gradients = told
        return Seen(facts, array("q", addresses), held, gradients)

    @property
    def counts(self) -> bool:
        """Whether versions are counted here, which `again` does."""
        return self._bump is not None

    def again(
        self,
        groups: list[dict[str, Any]],
        held: list[dict[str, Any]] | None,
        params: list[list[nn.Parameter]],
        names: list[tuple[str, ...]],
        state: dict[Tensor, Any],
        known: bytes,
        turns: bytes,
        addresses: bytes,
    ) -> list[Any] | None:
        """Whether facts are the `known` ones, and steps as far as `turns` have them, by address.

        If so, versions are counted of all that a step writes. What there is then is what gradients
        stay in memory with; and their addresses, if they moved from there. With `held`, which the
        groups must hold too, all turns are taken where nothing moved, and there is nothing then.
        Raises `DeviceError` for what the driver says.
        """
        told: list[Any] = []
        given = groups, held, params, names, state, known, turns, addresses, told
        found = self._again(*self._places, *given)
        if found < 0:
            raise_launch(-found)
        return told if found else None

    def tell(
        self, held: list[Tensor], grads: list[Tensor]
    ) -> "tuple[list[bytes], array[int]] | None":
        """The same facts of these, and the addresses of gradients; None for what is not plain."""
        told: list[bytes] = []
        if not self._tell(*self._places, held, grads, told):
            return None
        facts, addresses = told
        return [facts], array("q", addresses)

    def bump(self, tensors: list[Tensor]) -> None:
        """As `torch.autograd.graph.increment_version`, which does what is left here."""
        done = self._bump(tensors) if self._bump is not None else 0
        if done < len(tensors):
            torch.autograd.graph.increment_version(tensors[done:])

    def are(self, cells: "array[int]", wide: bool, value: float) -> bool:
        """Whether that is the number at each of these addresses: fp32, or `wide`, fp64."""
        return bool(self._are(*cells.buffer_info(), wide, value))

    def become(self, cells: "array[int]", wide: bool, value: float) -> None:
        """Write it there."""
        self._become(*cells.buffer_info(), wide, value)


@torch.inference_mode(False)
def _undefined(theirs: ctypes.CDLL) -> int:
    """The TensorImpl of gradients that are not there. Raises `NotBuiltError`."""
    ask = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(address_of(theirs[GRADIENT]))
    plain, trained, empty = (torch.empty(n, device="cpu") for n in range(3))
    tensors = [plain, trained.requires_grad_(), nn.Parameter(empty)]
    grads = [torch.empty_like(tensor) for tensor in tensors[1:]]

    def told() -> list[int | None]:
        return [ctypes.c_void_p.from_address(ask(t._cdata)).value for t in tensors]

    before = told()
    for tensor, grad in zip(tensors[1:], grads, strict=True):
        tensor.grad = grad
    during = told()
    for tensor in tensors[1:]:
        tensor.grad = None
    undefined, there = before[0], [grad._cdata for grad in grads]
    alike = {*before, *told()} == {undefined} and during == [undefined, *there]
    if alike and undefined:
        return undefined
    raise NotBuiltError("a TensorImpl does not tell its gradient as it did")


@torch.inference_mode(False)
def _bumps(bump: Callable[..., int]) -> bool:
    """Whether it does what torch's own call does to tensors of several kinds."""
    base = torch.zeros(3, device="cpu")
    tensors = [base, base[1:], nn.Parameter(base.clone()), torch.zeros(0, device="cpu")]
    with torch.inference_mode():
        odd = torch.zeros(1, device="cpu")
    before = [t._version for t in tensors]
    done = bump(tensors), bump([odd]), bump([*tensors[2:], odd, base])
    after = [t._version - b for t, b in zip(tensors, before, strict=True)]
    return done == (4, 0, 2) and after == [2, 2, 2, 2]


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


def bump(tensors: list[Tensor]) -> None:
    """Count one more version of each, as `torch.autograd.graph.increment_version` does."""
    found = reader()
    if isinstance(found, Reader):
        found.bump(tensors)
    else:
        torch.autograd.graph.increment_version(tensors)
