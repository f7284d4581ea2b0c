"""Results of one weight-only program on one set of weights, shared by graphs of a process."""

import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from ipex_inductor.errors import DroppedWeightError
from ipex_inductor.passes.weights import weight_access
from ipex_inductor.passes.weights.program import Program
from ipex_inductor.passes.weights.weight_access import open_storage
from ipex_inductor.passes.weights.weight_reader import any_reader
from ipex_inductor.reporting import decisions
from ipex_inductor.templates.tensor_reader import freed, write_watch
from ipex_inductor.templates.tensor_reader.weights_cpp import Hashes, reader
from ipex_inductor.templates.tensor_reader.weights_triton import DeviceHashes, hash_on_device
from ipex_inductor.templates.tensor_reader.write_watch import WatchedPages

State = tuple[int, ...]  # versions, then addresses

_shared: "weakref.WeakValueDictionary[Any, Part]" = weakref.WeakValueDictionary()


class User(Protocol):
    """Protocol of what uses results, and requests them through `current`."""

    current: Any  # None: results are computed or looked up again

    def die(self) -> None:
        """Give up the results: a weight died."""


class Part:
    """Results of one program for one set of weights, alive as long as a snapshot holds them.

    Attributes:
        hashes: The contents of each weight that they were computed from; None: not compared.
        watched: Addresses of the weights' storages.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.captured = False
        self.values: list[torch.Tensor] = []
        self.hashes: list[Hashes | DeviceHashes | None] = [None] * len(program.inputs)
        self.storages: list[weakref.ref[torch.UntypedStorage]] = []
        self.users: tuple[weakref.ref[User], ...] = ()
        self.watched: tuple[int, ...] = ()
        self._weights: list[weakref.ref[_Life]] = []
        self._own: list[torch.Tensor] = []  # values that share no storage with a weight
        self._state: State | None = None
        self._ran = False  # whether the program ran on the weights in that state
        self._alone = False  # the weights' storage is released: nothing is left to compute from

    def is_of(self, state: State) -> bool:
        """Return whether the values were computed from weights in this state."""
        return bool(state) and self._state == state

    def observe(self, weights: Sequence[torch.Tensor], state: State, watched: bool) -> None:
        """Note the contents of `weights`, and accesses to them from now on.

        Raises `DroppedWeightError` if a weight's storage is released.

        Args:
            weights: The weights of the program.
            state: Their versions and addresses.
            watched: Whether the kernel notes writes.
        """
        if any(map(freed.is_freed, weights)):
            detail = "one that was packed otherwise, as for other sizes, and freed"
            raise DroppedWeightError("a weight with data", detail, freed.TODO)
        self._alone = False
        for weight in weights:
            _life(weight).parts = [part for part in _life(weight).parts if part is not self]
        self.storages, self._weights = [], []  # callbacks of the old ones are dropped
        self.hashes = [None] * len(weights)  # which stops watching their pages
        self.drop()
        storages = [open_storage(w) for w in weights]
        self.storages = [weakref.ref(s, _calls(self, Part.drop)) for s in storages]
        self._weights = [weakref.ref(_life(w), _calls(self, Part.free)) for w in weights]
        self.watched = tuple({s._cdata for s in storages})
        weight_access.watch(weights, self)
        self.hashes = [_hashes(weight, watched) for weight in weights]
        self._state, self._ran = state, False

    def watch_writes(self) -> bool:
        """Have the kernel note writes from now on; return whether that is new for some weight."""
        begun = False
        for number, content in enumerate(self.hashes):
            if not isinstance(content, Hashes) or content.pages:
                continue
            pages = _watch(content.address, content.size)
            if pages is not None:
                self.hashes[number] = replace(content, pages=pages)
                begun = True
        return begun

    def update(self, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the values; run the program if the weights were observed since it last ran."""
        if self._ran:
            return self.values
        storages = [open_storage(w) for w in weights]
        try:
            values = _settle(self.values, self.program.run(weights), self._own)
        except BaseException:
            self._state = None
            raise
        self.values, self._ran = values, True
        self._own = [v for v in values if storage_of(v) not in storages]
        return values

    def free_weights(self, weights: Sequence[torch.Tensor]) -> bool:
        """Release the weights' storage if nothing else has it; return whether that was done."""
        if self._alone or len(self._own) < len(self.values):
            return False
        if why := freed.free(weights):
            decisions.log.info("plain weights are not freed: %s", why)
            return False
        self._state = state_of_part(any_reader().read(tuple(weights)), tuple)
        self._alone, self.hashes = True, [None] * len(weights)
        for user in self.users:  # they know the weights by their old addresses
            if (snapshot := user()) is not None:
                snapshot.current = None
        for weight in weights:
            _life(weight).parts.append(self)
        return True

    def is_current(self, storage: int | None = None) -> bool:
        """Return whether the contents that the values were computed from are unchanged.

        Args:
            storage: address of the only one whose contents are compared; None for all. A small
                weight that something may write costs no comparison of the large ones beside it.
        """
        return self.find_outdated(storage) is None

    def find_outdated(self, only: int | None = None) -> int | None:
        """Return the number of the first weight that is not known to be unchanged, or None.

        Args:
            only: address of the only storage whose contents are compared; None for all.
        """
        if self._alone:
            return None
        for number, (hashes, ref) in enumerate(zip(self.hashes, self.storages, strict=False)):
            storage = ref()
            if only is not None and storage is not None and storage._cdata != only:
                continue
            if hashes is None or storage is None or not _holds(storage, hashes):
                return number
            if isinstance(hashes, DeviceHashes):
                if not hashes.is_same():
                    return number
            elif any_reader().hashes(hashes.address, hashes.size).words != hashes.words:
                return number
        return None

    def outdate(self) -> int:
        """Drop the values if they can be computed again; return how many were up to date.

        They cannot be where the weights' storage is released.
        """
        return 0 if self._alone else self.drop()

    def outdate_storages(self) -> None:
        """Outdate all results computed from weights in these storages, of other graphs too."""
        for storage in self.watched:
            weight_access.outdate(storage)

    def drop(self) -> int:
        """Have the values computed again at their next use; return how many were up to date."""
        valid = len(self.values) if self._state else 0
        self._state = None
        weight_access.unwatch(self.watched, self)
        for user in self.users:
            snapshot = user()
            if snapshot is not None:
                snapshot.current = None
        if not self.captured:
            self.values, self._own = [], []
        return valid

    def free(self) -> None:
        """Drop the values and their addresses for good; the users give up."""
        self.drop()
        self.values, self._own = [], []
        for user in self.users:
            snapshot = user()
            if snapshot is not None:
                snapshot.die()


class _Life:
    """Lifetime marker that a weight carries, and that dies with it.

    A weak reference to the weight itself would keep users from `torch.utils.swap_tensors`, which
    `module.to` and `load_state_dict` may use.
    """

    __slots__ = ("__weakref__", "parts")

    def __init__(self) -> None:
        self.parts: list[Part] = []  # results that hold the data of a weight with released storage

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return OrderedDict, ()  # a saved weight is loaded without this package


def _life(weight: torch.Tensor) -> _Life:
    carried = vars(weight)
    if not isinstance(carried.get("_ipex_life"), _Life):
        carried["_ipex_life"] = _Life()
    life: _Life = carried["_ipex_life"]
    return life


def _calls(part: Part, method: Callable[[Part], object]) -> Callable[[object], None]:
    """Return a callback that calls `method` and does not keep `part` alive."""
    weak = weakref.ref(part)

    def call(_: object) -> None:
        alive = weak()
        if alive is not None:
            method(alive)

    return call


def shared_part(program: Program, key: tuple[int, ...], captured: bool) -> Part:
    """Return the part of the weights with these identities, shared by the process's graphs."""
    part = _shared.setdefault((program.text, key), Part(program))
    part.captured |= captured
    return part


def state_of_part(read: bytes, select: Callable[[Sequence[Any]], tuple[Any, ...]]) -> State:
    """Return versions and addresses of the weights of a part.

    Args:
        read: Identities, versions and addresses of all weights of the graph.
        own: Returns the elements of a block that belong to the part's weights.
    """
    numbers = memoryview(read).cast("q").tolist()
    count = len(numbers) // 3
    blocks = numbers[count : 2 * count], numbers[2 * count :]
    return tuple(n for block in blocks for n in select(block)) if numbers else ()


def _hashes(weight: torch.Tensor, watched: bool) -> Hashes | DeviceHashes | None:
    """Return the contents of a weight's memory; None if nothing can compare them."""
    if not weight.numel():
        return Hashes(0, 0, b"")
    steps = zip(weight.shape, weight.stride(), strict=True)
    elements = 1 + sum((size - 1) * stride for size, stride in steps)
    address, size = weight.data_ptr(), elements * weight.element_size()
    if weight.device.type != "cpu":
        return hash_on_device(address, size, weight.device)
    pages = _watch(address, size) if watched else None  # first, so that later writes show
    (owner,) = any_reader().owners((weight,))
    is_own = owner.deleter == any_reader().allocator  # else a mapped file, or pinned memory
    return replace(any_reader().hashes(address, size), pages=pages, in_turn=not is_own)


def _watch(address: int, size: int) -> WatchedPages | None:
    """Have the kernel note writes to memory; return None where it does not."""
    kernel = write_watch.kernel() if reader() else None  # the Python reader does not query it
    try:
        return kernel.watch(address, size) if kernel else None
    except write_watch.UnwatchableError as error:
        decisions.log.info("writes to %d bytes of weights are not noted: %s", size, error.strerror)
        return None


def _holds(storage: torch.UntypedStorage, hashes: Hashes | DeviceHashes) -> bool:
    """Return whether the hashed memory still belongs to the storage."""
    if not hashes.size:
        return True
    begin = storage.data_ptr()
    return begin <= hashes.address and hashes.address + hashes.size <= begin + storage.nbytes()


def storage_of(value: torch.Tensor) -> torch.UntypedStorage | None:
    """Return the storage, None for oneDNN's opaque tensors."""
    return open_storage(value) if value.layout == torch.strided else None


def addresses_of(part: Part) -> list[int]:
    """Return the addresses of the weights' storages that are alive."""
    return [storage._cdata for storage in (ref() for ref in part.storages) if storage is not None]


def _settle(
    old: list[torch.Tensor], new: list[torch.Tensor], owned: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Return the new values, at the old addresses where they fit.

    Args:
        old: The former values, or none.
        new: The new values.
        owned: The old values that share no storage with a weight.
    """

    def fits(a: torch.Tensor, b: torch.Tensor) -> bool:
        same = a is not b and a.device == b.device and a.dtype == b.dtype and a.shape == b.shape
        strided = a.layout == b.layout == torch.strided
        return same and strided and a.stride() == b.stride() and any(a is o for o in owned)

    with torch.inference_mode(False), torch.no_grad():
        return [_write(a, b) if fits(a, b) else b for a, b in zip(old or new, new, strict=True)]


def _write(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Write a value of equal shape and strides to `old`, whose elements may share memory."""
    if torch._debug_has_internal_overlap(old) != 1:  # `copy_` raises on 1
        return old.copy_(new)
    span = 1 + sum((size - 1) * step for size, step in zip(old.shape, old.stride(), strict=True))
    if old.numel():
        old.as_strided((span,), (1,)).copy_(new.as_strided((span,), (1,)))
    return old


def all_parts() -> list[Part]:
    """Return the results that any graph of the process uses."""
    return list(_shared.values())
