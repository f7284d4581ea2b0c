"""Notice accesses that may have written a weight without counting a version.

Torch counts the versions that its operators write. It counts none for a write through `.data` (the
alias has a counter of its own), through memory that was handed out (`numpy()`, DLPack,
`untyped_storage()`), by a collective of `torch.distributed`, or by its fused optimizers. With the
first results computed from a weight, these accesses are noted for the process: in the C functions
of torch's methods, and else by wrappers. A note only concerns storages that results in use were
computed from:

- An alias is remembered by its counter, without its memory: a version that moved is a write.
- Memory that was handed out is *in doubt* as long as something may hold it. The contents of the
  weights in it are compared in full at each call.
- A step of an optimizer concerns the parameters that it holds.
"""

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from ipex_inductor import compat
from ipex_inductor.passes.weights import step_hook
from ipex_inductor.passes.weights.weight_reader import any_reader
from ipex_inductor.templates.build.cpp import NotBuiltError
from ipex_inductor.templates.tensor_reader import accesses_cpp

MANY_ALIASES = 4096  # the most aliases noted between two calls before they are settled
OWN = 2  # references to a storage: that of one tensor, and that of its object in Python
COLLECTIVES = (  # methods of a process group that write their arguments
    *("broadcast", "allreduce", "allreduce_coalesced", "reduce", "allgather", "_allgather_base"),
    *("allgather_coalesced", "allgather_into_tensor_coalesced", "gather", "scatter"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "alltoall"),
    *("alltoall_base", "recv", "recv_anysource", "all_gather_single", "all_to_all_single"),
    *("all_gather_single_coalesced", "reduce_scatter_single", "reduce_scatter_single_coalesced"),
)
open_storage = compat.open_storage


class Computed(Protocol):
    """Protocol of results computed from weights."""

    def outdate(self) -> object:
        """Have the results computed again at their next use."""

    def is_current(self, storage: int | None = None) -> bool:
        """Return whether contents the results were computed from are known to be unchanged.

        Args:
            storage: the only one whose contents are compared; None for all.
        """


@dataclass
class _Alias:
    """A tensor through which the weights of a storage can be written."""

    counter: torch.Tensor  # shares the alias's version, and holds no memory
    storage: int
    version: int  # at the last `settle`


class _Doubt(NamedTuple):
    """A reason to compare the contents of a storage at each call."""

    lasts: Callable[[], bool]
    is_work: bool  # a collective still runs; no later comparison of the memory would show it


_lock = threading.RLock()
_computed: dict[int, tuple[weakref.ref[Computed], ...]] = {}  # by address of the storage
_aliases: "dict[int, _Alias]" = {}  # by address of the version counter
_most = MANY_ALIASES
_seen: tuple[tuple[torch.Tensor, ...], bytes] = ((), b"")  # counters, as `settle` last read them
_doubts: dict[int, list[_Doubt]] = {}  # by storage


def is_quiet() -> bool:
    """Return whether `settle` has nothing to do."""
    return not (_aliases or _doubts)


def watch(weights: Sequence[torch.Tensor], computed: Computed) -> None:
    """Note accesses to `weights` from now on, until `computed` is outdated or gone."""
    install()
    with _lock:
        for storage in {open_storage(weight)._cdata for weight in weights}:
            watchers = [ref for ref in _computed.get(storage, ()) if ref() not in (None, computed)]
            on_death = functools.partial(_forget, storage)
            _computed[storage] = (*watchers, weakref.ref(computed, on_death))


def unwatch(storages: Iterable[int], computed: Computed) -> None:
    """End `watch` for results that are outdated."""
    for storage in storages:
        for ref in _computed.get(storage, ()):
            if ref() is computed:
                _forget(storage, ref)


def _forget(storage: int, watcher: "weakref.ref[Computed]") -> None:
    if remaining := tuple(ref for ref in _computed.get(storage, ()) if ref is not watcher):
        _computed[storage] = remaining
    else:
        _computed.pop(storage, None)


def count_holders(storage: torch.UntypedStorage) -> int:
    """Return the number of references to a storage, including that of its Python object."""
    return int(torch._C._storage_Use_Count(storage._cdata))


def has_more_holders(handle: "weakref.ref[torch.UntypedStorage]", count: int) -> bool:
    """Return whether a storage is alive and has more than `count` references."""
    storage = handle()
    return storage is not None and count_holders(storage) > count


def is_held(handle: "weakref.ref[torch.UntypedStorage]") -> bool:
    """Return whether anything but torch refers to a storage's Python object."""
    storage = handle()
    return storage is not None and sys.getrefcount(storage) > _references_of_torch()


def is_alive(handle: "weakref.ref[Any]") -> bool:
    """Return whether an object is alive."""
    return handle() is not None


@functools.cache
def _references_of_torch() -> int:
    tensor = torch.zeros(1, device="cpu")
    handle = weakref.ref(open_storage(tensor))
    held = handle()
    return sys.getrefcount(held)


def note_alias(alias: torch.Tensor, storage: int) -> None:
    """Remember a tensor through which the weights of a storage can be written."""
    if storage not in _computed:
        return
    counter = _counter_of(alias)
    if counter is None:
        doubt(storage, functools.partial(is_alive, weakref.ref(alias)))
        return
    key = any_reader().owners((counter,))[0].counter or id(counter)
    _aliases.setdefault(key, _Alias(counter, storage, counter._version))
    if len(_aliases) > _most:
        settle()


def _counter_of(alias: torch.Tensor) -> torch.Tensor | None:
    """Return a tensor that shares the version counter of `alias` and holds no memory.

    None for inference tensors, which have no version, and inside of functorch's transforms.
    """
    if alias.is_inference():
        return None
    try:
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            counter = alias.detach()
            compat.tensor_data.__set__(counter, alias.new_empty(0))
    except RuntimeError:
        return None
    return counter


def doubt(storage: int, lasts: Callable[[], bool], is_work: bool = False) -> None:
    """Compare the contents of a storage at the next call, and at each call while `lasts()`."""
    if storage in _computed:
        _doubts.setdefault(storage, []).append(_Doubt(lasts, is_work))


def outdate(storage: int) -> None:
    """Have all results computed from weights in a storage computed again."""
    for ref in _computed.get(storage, ()):
        computed = ref()
        if computed is not None:
            computed.outdate()


def outdate_if_written(storage: int) -> None:
    """Compare the contents of all weights in a storage; outdate results of changed ones."""
    doubt(storage, lambda: False)
    settle((storage,))


def settle(only: Container[int] | None = None) -> frozenset[int]:
    """Outdate what was written since the last call; return storages that stay in doubt.

    Args:
        only: the storages whose contents are compared; None: all that are in doubt.
    """
    with _lock:
        _settle_aliases()
        concerned = [s for s in _doubts if only is None or s in only]
        for storage in concerned:
            doubts = _doubts[storage]
            lasting = [doubt for doubt in doubts if doubt.lasts()]  # first: it may end meanwhile
            for ref in _computed.get(storage, ()):
                computed = ref()
                if computed is not None and not computed.is_current(storage):
                    computed.outdate()
            # Outdated storages are checked again when results are computed from them.
            if storage not in _computed:
                lasting = [doubt for doubt in lasting if doubt.is_work]
            if lasting:
                _doubts[storage] = lasting
            else:
                _doubts.pop(storage, None)
        return frozenset(s for s in concerned if s in _doubts)


def _settle_aliases() -> None:
    global _most, _seen
    if not _aliases:
        return
    counters, read = _seen
    if len(counters) == len(_aliases) and any_reader().counters(counters) == read:
        return
    noted = list(_aliases.items())
    counters = tuple([alias.counter for _, alias in noted])
    numbers = memoryview(any_reader().counters(counters)).cast("q").tolist()
    versions, sharers = numbers[: len(noted)], numbers[len(noted) :]
    for (key, alias), version, sharing in zip(noted, versions, sharers, strict=True):
        if version != alias.version:
            alias.version = version
            outdate(alias.storage)
        if sharing <= 1 or alias.storage not in _computed:
            del _aliases[key]
    counters = tuple([alias.counter for alias in _aliases.values()])
    _seen = counters, any_reader().counters(counters)
    _most = max(MANY_ALIASES, 2 * len(counters))


def _storage_of(tensor: Any) -> int:
    """Return the address of a tensor's storage if results in use were computed from it, else 0."""
    storage = any_reader().storage_of(tensor) if isinstance(tensor, torch.Tensor) else 0
    return storage if storage in _computed else 0


def _note_data(_: torch.Tensor, alias: Any) -> None:
    """Note what `.data` returned."""
    if storage := _storage_of(alias):
        note_alias(alias, storage)


def _note_set_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Note the value that `.data` was set to.

    Other memory shows by its address; equal memory may have been written through `value`.
    """
    if value is not tensor and (storage := _storage_of(tensor)):
        outdate(storage)
        note_alias(value, storage)


def _note_array(tensor: Any, array: Any) -> None:
    # Handlers of a subclass may return anything.
    if type(array).__weakrefoffset__ and (storage := _storage_of(tensor)):
        doubt(storage, functools.partial(is_alive, weakref.ref(array)))


def _note_storage(_: Any, handle: Any) -> None:
    if (storage := getattr(handle, "_cdata", 0)) in _computed:
        doubt(storage, functools.partial(is_held, weakref.ref(handle)))


def _note_capsule(tensor: Any, _: Any) -> None:
    """Doubt the storage while a reader of a DLPack capsule may hold the tensor or its memory."""
    if not (storage := _storage_of(tensor)):
        return
    users, held = tensor._use_count(), weakref.ref(tensor)
    handle = weakref.ref(open_storage(tensor))

    def lasts() -> bool:
        exported = held()
        shared = exported is not None and exported._use_count() >= users > 1
        return shared or has_more_holders(handle, OWN)

    doubt(storage, lasts)


def _note_collective(arguments: Iterable[Any], work: Any) -> None:
    for tensor in _tensors_in(arguments):
        if storage := _storage_of(tensor):
            doubt(storage, functools.partial(_is_running, work), is_work=True)


def _is_running(work: Any) -> bool:
    try:
        return work is not None and not work.is_completed()
    except RuntimeError:  # it failed; `wait` raises the error
        return False


def _tensors_in(values: Any) -> Iterable[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors_in(value)


def _note_step(optimizer: torch.optim.Optimizer) -> None:
    """Outdate results of the parameters that an optimizer stepped.

    Torch's fused optimizers write them without counting a version (2.11 to 2.15).
    """
    if not _computed:
        return
    held = (p for group in optimizer.param_groups for p in group["params"])
    stepped = tuple(p for p in held if p.grad is not None)
    for storage in {owner.storage for owner in any_reader().owners(stepped)} & _computed.keys():
        outdate(storage)


@functools.cache
def install() -> None:
    """Note the accesses, from now on in this process.

    Dynamo neither compiles nor traces the functions that do. It guards the hooks of optimizers, so
    steps that other backends compiled before are compiled again once.
    """
    any_reader()
    notes = (_note_array, _note_storage, _note_capsule, _note_data, _note_set_data)
    functions: list[Callable[..., Any]] = [*notes, _note_collective]
    try:
        accesses_cpp.note_accesses(*notes, _computed)
    except NotBuiltError:
        functions += _wrap_accessors()
    if torch.distributed.is_available():
        functions += _wrap(torch.distributed.ProcessGroup, COLLECTIVES, _note_collective)
        functions += _wrap(torch.distributed, ("_broadcast_coalesced",), _note_collective)
    compat.hide_from_dynamo(__name__, functions)
    step_hook.register(_note_step)


def _wrap_accessors() -> list[Callable[..., Any]]:
    """Wrap the accessors in Python, where their C functions cannot be replaced."""
    data = compat.tensor_data

    def get_data(tensor: torch.Tensor) -> Any:
        alias = data.__get__(tensor)
        if _computed:
            _note_data(tensor, alias)
        return alias

    def set_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
        data.__set__(tensor, value)
        if _computed:
            _note_set_data(tensor, value)

    def delete_data(tensor: torch.Tensor) -> None:
        data.__delete__(tensor)  # raises

    wrappers: list[Callable[..., Any]] = [get_data, set_data, delete_data]
    for owner, name, note in (
        (torch.Tensor, "numpy", _note_array),
        (torch.Tensor, "untyped_storage", _note_storage),
        (torch.Tensor, "__dlpack__", _note_capsule),
        (torch, "to_dlpack", _note_capsule),
        (torch.utils.dlpack, "to_dlpack", _note_capsule),
    ):
        wrappers += _wrap(owner, (name,), functools.partial(_note_first, note))
    torch.Tensor.data = property(  # type: ignore[assignment]
        get_data, set_data, delete_data, doc=data.__doc__
    )
    return [*wrappers, _note_first]


def _note_first(note: accesses_cpp.Note, arguments: Sequence[Any], result: Any) -> None:
    note(arguments[0], result)


def _wrap(
    owner: Any, names: Iterable[str], note: Callable[..., Any]
) -> Iterable[Callable[..., Any]]:
    for name in names:
        method = getattr(owner, name, None)
        if method is not None:  # else this torch does not have it
            wrapper = _wrapper(method, note)
            if isinstance(owner, type):  # where pickle looks for it
                wrapper.__module__, wrapper.__qualname__ = (
                    owner.__module__,
                    f"{owner.__name__}.{name}",
                )
            setattr(owner, name, wrapper)
            yield wrapper


def _wrapper(method: Callable[..., Any], note: Callable[..., Any]) -> Any:
    @functools.wraps(method)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        if _computed:
            note((*args, *kwargs.values()), result)
        return result

    return wrapper
