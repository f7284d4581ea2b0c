"""Notice what may have written a weight without counting a version.

Torch counts the versions that its operators write. It counts none for a write through `.data` (the
alias has a counter of its own), through memory that was handed out (`numpy()`, DLPack,
`untyped_storage()`), by a collective of `torch.distributed`, or by its fused optimizers. With the
first results computed from a weight, these accesses are wrapped for the process. A wrapper does
nothing but note the storage concerned, if results in use were computed from it:

- An alias is remembered by its counter, without its memory: a version that moved is a write.
- Memory that was handed out is *in doubt* as long as somebody may hold it. The contents of the
  weights in it are compared in full at each call.
- A step of an optimizer concerns the parameters that it holds.
"""

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ipex_inductor.templates.weights_cpp import Reader, reader

MANY_ALIASES = 4096  # noted between two calls, before they are looked at
OWN = 2  # references to a storage: that of one tensor, and that of its object in Python
COLLECTIVES = (  # methods of a process group that write tensors they are given
    *("broadcast", "allreduce", "allreduce_coalesced", "reduce", "allgather", "_allgather_base"),
    *("allgather_coalesced", "allgather_into_tensor_coalesced", "gather", "scatter"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "alltoall"),
    *("alltoall_base", "recv", "recv_anysource", "all_gather_single", "all_to_all_single"),
    *("all_gather_single_coalesced", "reduce_scatter_single", "reduce_scatter_single_coalesced"),
)
# Of torch, as they were before they were wrapped.
read_data: Callable[[torch.Tensor], torch.Tensor] = vars(torch._C.TensorBase)["data"].__get__
_write_data: Callable[[torch.Tensor, torch.Tensor], None] = vars(torch._C.TensorBase)[
    "data"
].__set__
open_storage = torch.Tensor.untyped_storage
_version = attrgetter("_version")


class Computed(Protocol):
    """Results computed from weights."""

    def outdate(self) -> object:
        """Have them computed again at their next use."""

    def is_current(self) -> bool:
        """Return whether all contents they were computed from are known to be as they were."""


class _Alias:
    """A tensor with a weight's memory and a version counter of its own."""

    __slots__ = ("counter", "storage", "version")

    def __init__(self, alias: torch.Tensor, storage: int) -> None:
        self.storage = storage
        self.version = alias._version
        # It shares the counter and holds no memory.
        with torch._C._DisableTorchDispatch():
            self.counter = alias.detach()
            _write_data(self.counter, alias.new_empty(0))


_lock = threading.RLock()
_computed: dict[int, tuple[weakref.ref[Computed], ...]] = {}  # by address of the storage
_aliases: list[_Alias] = []
_doubts: dict[int, list[Callable[[], bool]]] = {}  # by storage: whether a holder is left


def is_quiet() -> bool:
    """Return whether nothing was noted since `settle`."""
    return not (_aliases or _doubts)


def watch(weights: Sequence[torch.Tensor], computed: Computed) -> None:
    """Note accesses to `weights` from now on, until `computed` is outdated."""
    install()
    with _lock:
        for weight in weights:
            storage = open_storage(weight)._cdata
            others = [ref for ref in _computed.get(storage, ()) if ref() not in (None, computed)]
            _computed[storage] = (*others, weakref.ref(computed))


def unwatch(storages: Iterable[int], computed: Computed) -> None:
    """End `watch` for results that are outdated or gone."""
    for storage in storages:
        left = [ref for ref in _computed.get(storage, ()) if ref() not in (None, computed)]
        if left:
            _computed[storage] = tuple(left)
        else:
            _computed.pop(storage, None)


def count_holders(storage: torch.UntypedStorage) -> int:
    """Return how many references to a storage there are, that of its Python object among them."""
    return int(torch._C._storage_Use_Count(storage._cdata))


def has_more_holders(handle: "weakref.ref[torch.UntypedStorage]", count: int) -> bool:
    """Return whether a storage is alive and more than `count` references to it are."""
    storage = handle()
    return storage is not None and count_holders(storage) > count


def is_held(handle: "weakref.ref[torch.UntypedStorage]") -> bool:
    """Return whether anything but torch refers to a storage's Python object."""
    storage = handle()
    return storage is not None and sys.getrefcount(storage) > _references_of_torch()


def is_alive(handle: "weakref.ref[Any]") -> bool:
    """Return whether an object is still there."""
    return handle() is not None


def note_alias(alias: torch.Tensor, storage: int) -> None:
    """Remember a tensor through which the weights of a storage can be written."""
    if storage not in _computed:
        return
    if alias.is_inference():  # has no version
        doubt(storage, functools.partial(is_alive, weakref.ref(alias)))
        return
    _aliases.append(_Alias(alias, storage))
    if len(_aliases) > MANY_ALIASES:
        settle()


def doubt(storage: int, lasts: Callable[[], bool]) -> None:
    """Compare the contents of a storage at the next call, and as long as `lasts()`."""
    if storage in _computed:
        _doubts.setdefault(storage, []).append(lasts)


def outdate(storage: int) -> None:
    """Have all results computed from weights in a storage computed again."""
    for ref in _computed.get(storage, ()):
        computed = ref()
        if computed is not None:
            computed.outdate()


def settle() -> frozenset[int]:
    """Outdate what was written since the last call; return storages that stay in doubt."""
    with _lock:
        _settle_aliases()
        for storage, holders in list(_doubts.items()):
            for ref in _computed.get(storage, ()):
                computed = ref()
                if computed is not None and not computed.is_current():
                    computed.outdate()
            if left := [lasts for lasts in holders if lasts()]:
                _doubts[storage] = left
            else:
                _doubts.pop(storage, None)
        return frozenset(_doubts)


def _settle_aliases() -> None:
    noted = list(_aliases)
    if not noted:
        return
    counters = tuple(alias.counter for alias in noted)
    found = reader()
    if isinstance(found, Reader):
        versions, sharers = found.counters(counters)
    else:  # how many share a counter is unknown
        versions, sharers = list(map(_version, counters)), [2] * len(noted)
    left = []
    for alias, version, sharing in zip(noted, versions, sharers, strict=True):
        if version != alias.version:
            alias.version = version
            outdate(alias.storage)
        if sharing > 1 and alias.storage in _computed:
            left.append(alias)
    _aliases[: len(noted)] = left


def _storage_of(tensor: Any) -> int:
    """Return the address of a tensor's storage if results in use were computed from it, else 0."""
    if not _computed or not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
        return 0
    try:
        storage = open_storage(tensor)._cdata
    except (RuntimeError, NotImplementedError):  # a subclass without memory of its own
        return 0
    return storage if storage in _computed else 0


def _get_data(tensor: torch.Tensor) -> torch.Tensor:
    alias = read_data(tensor)
    if _computed and (storage := _storage_of(alias)):
        note_alias(alias, storage)
    return alias


def _set_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Another memory shows by its address; the same may have been written through `value`."""
    _write_data(tensor, value)
    if _computed and value is not tensor and (storage := _storage_of(tensor)):
        outdate(storage)
        note_alias(value, storage)


def _note_array(method: Callable[..., Any], tensor: Any, *args: Any, **kwargs: Any) -> Any:
    array = method(tensor, *args, **kwargs)
    if storage := _storage_of(tensor):
        doubt(storage, functools.partial(is_alive, weakref.ref(array)))
    return array


def _note_storage(method: Callable[..., Any], tensor: Any, *args: Any, **kwargs: Any) -> Any:
    handle = method(tensor, *args, **kwargs)
    if _computed and handle._cdata in _computed:
        doubt(handle._cdata, functools.partial(is_held, weakref.ref(handle)))
    return handle


@functools.cache
def _references_of_torch() -> int:
    tensor = torch.zeros(1, device="cpu")
    handle = weakref.ref(open_storage(tensor))
    held = handle()
    return sys.getrefcount(held)


def _note_capsule(method: Callable[..., Any], tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """Note that whatever reads a DLPack capsule holds the tensor, or its memory."""
    capsule = method(tensor, *args, **kwargs)
    if storage := _storage_of(tensor):
        users, held = tensor._use_count(), weakref.ref(tensor)
        handle = weakref.ref(open_storage(tensor))

        def lasts() -> bool:
            exported = held()
            shared = exported is not None and exported._use_count() >= users > 1
            return shared or has_more_holders(handle, OWN)

        doubt(storage, lasts)
    return capsule


def _note_collective(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    work = method(*args, **kwargs)
    if _computed:
        for tensor in _tensors_in((args, tuple(kwargs.values()))):
            if storage := _storage_of(tensor):
                doubt(storage, functools.partial(_is_running, work))
    return work


def _is_running(work: Any) -> bool:
    try:
        return work is not None and not work.is_completed()
    except RuntimeError:  # that failed, as it tells whoever waits
        return False


def _tensors_in(values: Any) -> Iterable[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors_in(value)


def _note_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Torch's fused optimizers write parameters without counting a version (2.11 to 2.15)."""
    if not _computed or torch.compiler.is_compiling():  # a compiled step counts versions
        return
    held = tuple(p for group in optimizer.param_groups for p in group["params"])
    found = reader()
    if isinstance(found, Reader):
        storages = {owner.storage for owner in found.owners(held)}
    else:
        storages = {_storage_of(parameter) for parameter in held}
    for storage in storages & _computed.keys():
        outdate(storage)


@functools.cache
def install() -> None:
    """Wrap the accesses, once a process."""
    data = property(_get_data, _set_data, doc=torch._C.TensorBase.data.__doc__)
    torch.Tensor.data = data  # type: ignore[assignment]
    for owner, names, note in (
        (torch.Tensor, ("numpy",), _note_array),
        (torch.Tensor, ("untyped_storage",), _note_storage),
        (torch.Tensor, ("__dlpack__",), _note_capsule),
        (torch, ("to_dlpack",), _note_capsule),
        (torch.utils.dlpack, ("to_dlpack",), _note_capsule),
    ):
        _wrap(owner, names, note)
    if torch.distributed.is_available():
        _wrap(torch.distributed.ProcessGroup, COLLECTIVES, _note_collective)
        _wrap(torch.distributed, ("_broadcast_coalesced",), _note_collective)
    register_optimizer_step_post_hook(_note_step)


def _wrap(owner: Any, names: Iterable[str], note: Callable[..., Any]) -> None:
    for name in names:
        method = getattr(owner, name, None)
        if method is not None:  # else of another torch
            setattr(owner, name, _wrapper(method, note))


def _wrapper(method: Callable[..., Any], note: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return note(method, *args, **kwargs)

    return wrapper
