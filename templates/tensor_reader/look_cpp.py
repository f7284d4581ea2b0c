"""Facts about hundreds of tensors read by one call of C++, instead of one by one from Python.

The step counters of optimizers, each in a place of its own, are read and written too.
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
from ipex_inductor.compat import private_memory
from ipex_inductor.templates.build.cpp import NotBuiltError, load, require_found
from ipex_inductor.templates.build.cuda import raise_launch

# torch::autograd::impl::bump_version(const at::Tensor&)
BUMP = "_ZN5torch8autograd4impl12bump_versionERKN2at6TensorE"
# `Torch` of look.cpp, in order: torch's stable C interface, and other exports, verified before use.
ASKED = (
    *("aoti_torch_get_data_ptr", "aoti_torch_get_layout"),
    *("aoti_torch_assign_tensors", private_memory.GRADIENT),
)
GRAD = sys.intern("grad")
_CELLS = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_double)


class Seen(NamedTuple):
    """Facts read from tensors: types, dtypes, sizes, strides and addresses.

    Of gradients they hold what vectorised access needs.

    `facts` are bytes, the object passed as `known` if they are equal. `held` are the parameters
    with a gradient, and then states; `gradients` keeps the gradients in memory as long as this
    exists.
    """

    facts: bytes
    addresses: "array[int]"  # addresses of gradients
    held: list[Tensor]
    gradients: object


class Reader:
    """The library of look.cpp. Raises `NotBuiltError`."""

    def __init__(self) -> None:
        layout = require_found(private_memory.layout())
        source = Path(__file__).with_name("look.cpp").read_text
        library = load(source, pairs({"template": "look"}), portable=True)
        try:
            # It includes the libraries that it is linked with.
            torch_library = ctypes.CDLL(torch._C.__file__)
            functions = [address_of(getattr(torch_library, name)) for name in ASKED]
            strided = torch_library.aoti_torch_layout_strided()
        except (AttributeError, OSError) as error:
            raise NotBuiltError(f"torch's C interface is not to be had: {error}") from error
        self._torch = array("q", (*functions, address_of(getattr(torch_library, BUMP, 0))))
        objects = map(id, (None, Tensor, nn.Parameter, GRAD))
        offsets = layout.impl, layout.keys, layout.negative, layout.python_object
        fields = layout.undefined_gradient, layout.dtype, layout.dimensions
        self._words = array("q", (*objects, strided, *offsets, *fields))
        self._places = [table.buffer_info()[0] for table in (self._torch, self._words)]
        pointer, py_object = ctypes.c_void_p, ctypes.py_object
        prototype = ctypes.PYFUNCTYPE(ctypes.c_int32, pointer, pointer, *[py_object] * 6)
        self._look = prototype(address_of(library.look))  # called with Python's lock held
        prototype = ctypes.PYFUNCTYPE(ctypes.c_int32, pointer, pointer, *[py_object] * 9)
        self._again = prototype(address_of(library.again))
        prototype = ctypes.PYFUNCTYPE(ctypes.c_int32, pointer, pointer, *[py_object] * 3)
        self._tell = prototype(address_of(library.tell))
        prototype = ctypes.PYFUNCTYPE(ctypes.c_int64, pointer, pointer, py_object)
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
        """Read parameters with their gradients and, for each with a gradient, its states by name.

        Args:
            groups: the parameters of each group.
            names: the names of the states of each group.
            state: the optimizer's state by parameter.
            known: the facts of the last call, or no bytes.

        Returns:
            None if a tensor is not plain or its memory is not, if a gradient is negated when it is
            read, or if a state is missing.
        """
        held: list[Tensor] = []
        results: list[Any] = []
        if not self._look(*self._places, groups, names, state, known, held, results):
            return None
        facts, addresses, gradients = results
        return Seen(facts, array("q", addresses), held, gradients)

    @property
    def counts(self) -> bool:
        """Return whether the library can count versions, which `check_and_count` does."""
        return self._bump is not None

    def check_and_count(
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
        """Check that the facts equal `known` and that the steps are as far as `turns` record them.

        If so, the version of everything that a step writes is counted. With `held`, which the
        groups must hold too, all turns are launched if nothing moved.

        Args:
            groups: the optimizer's parameter groups.
            held: the groups whose values must be unchanged, or None.
            params: the parameters of each group.
            names: the names of the states of each group.
            state: the optimizer's state by parameter.
            known: the facts of the last look.
            turns: the addresses of `Turn` structures.
            addresses: the addresses of the gradients then.

        Returns:
            None if something has changed. Otherwise a list with an object that keeps the gradients
            in memory and, if they moved, their addresses; it is empty if turns were launched.

        Raises:
            DeviceError: if the driver reports an error.
        """
        results: list[Any] = []
        arguments = groups, held, params, names, state, known, turns, addresses, results
        status = self._again(*self._places, *arguments)
        if status < 0:
            raise_launch(-status)
        return results if status else None

    def tell(
        self, held: list[Tensor], grads: list[Tensor]
    ) -> "tuple[list[bytes], array[int]] | None":
        """Return the facts of tensors and the addresses of gradients; None if not plain."""
        results: list[bytes] = []
        if not self._tell(*self._places, held, grads, results):
            return None
        facts, addresses = results
        return [facts], array("q", addresses)

    def bump(self, tensors: list[Tensor]) -> None:
        """Increment the versions of tensors; torch does it for tensors that the library skips."""
        done = self._bump(tensors) if self._bump is not None else 0
        if done < len(tensors):
            torch.autograd.graph.increment_version(tensors[done:])

    def are(self, cells: "array[int]", wide: bool, value: float) -> bool:
        """Return whether the number at each address is `value`.

        Args:
            cells: the addresses.
            wide: whether the numbers are fp64, else fp32.
            value: the number.
        """
        return bool(self._are(*cells.buffer_info(), wide, value))

    def become(self, cells: "array[int]", wide: bool, value: float) -> None:
        """Write a number to each address, as fp64 if `wide`, else fp32."""
        self._become(*cells.buffer_info(), wide, value)


@torch.inference_mode(False)
def _bumps(bump: Callable[..., int]) -> bool:
    """Return whether `bump` does what torch's own call does to tensors of several kinds."""
    base = torch.zeros(3, device="cpu")
    tensors = [base, base[1:], nn.Parameter(base.clone()), torch.zeros(0, device="cpu")]
    with torch.inference_mode():
        odd = torch.zeros(1, device="cpu")
    before = [t._version for t in tensors]
    done = bump(tensors), bump([odd]), bump([*tensors[2:], odd, base])
    after = [t._version - b for t, b in zip(tensors, before, strict=True)]
    return done == (4, 0, 2) and after == [2, 2, 2, 2]


def address_of(function: Any) -> int:
    """Return the address of a function of a library."""
    return ctypes.cast(function, ctypes.c_void_p).value or 0


@functools.cache
def reader() -> Reader | str:
    """Return the reader, or the reason why there is none."""
    try:
        return Reader()
    except NotBuiltError as error:
        return str(error)


def bump(tensors: list[Tensor]) -> None:
    """Increment the version of each tensor, as `torch.autograd.graph.increment_version` does."""
    library = reader()
    if isinstance(library, Reader):
        library.bump(tensors)
    else:
        torch.autograd.graph.increment_version(tensors)
