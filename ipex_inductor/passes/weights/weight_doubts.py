"""Find weights whose memory can be written without torch's notice.

Memory that torch allocated itself is written through torch, and so is a file that is mapped for
this process alone. Shared memory has writers in other processes. Memory that another library
allocated (numpy, DLPack, Python's buffers) has writers that torch does not know.
"""

import functools
import gc
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from ipex_inductor.passes.weights import weight_access
from ipex_inductor.passes.weights.weight_access import (
    OWN,
    count_holders,
    has_more_holders,
    is_alive,
    is_held,
    open_storage,
)
from ipex_inductor.passes.weights.weight_reader import any_reader
from ipex_inductor.templates.tensor_reader import freed

FULL = 1 << 18  # the most bytes compared in full at each call: some 20 microseconds
SHARED = "they lie in shared memory, which another process may write at any time"
BORROWED = "their memory belongs to another library (numpy, DLPack), which may write it at any time"
UNVERSIONED = (
    "made in inference mode, they have no versions, and contents on a GPU are not compared"
)
OPEN = "their storage is held by the program, which may write it at any time"


class Doubt(NamedTuple):
    """A storage that may be written without torch's notice while `lasts()` returns True."""

    storage: int  # its address, as `weight_reader` returns it
    size: int  # bytes of the weight in it
    reason: str
    lasts: Callable[[], bool]


def lasting_doubts(weights: Sequence[torch.Tensor]) -> list[Doubt]:
    """Return the storages of weights that something other than torch may write, one doubt each.

    A doubt lasts while the storage is alive or, if the program holds it, while it is held.
    """
    reader = any_reader()
    mappings: list[_Mapping] = []
    doubts = {}
    for weight, owner in zip(weights, reader.owners(weights), strict=True):
        if not weight.numel() or owner.storage in doubts or freed.is_freed(weight):
            continue
        storage_ref = weakref.ref(open_storage(weight))
        if reader.allocator:
            is_borrowed = owner.deleter != reader.allocator
        else:  # torch's allocator could not be identified
            is_borrowed = not open_storage(weight).resizable()
        reason, still_applies = "", is_alive
        if is_held(storage_ref):
            reason, still_applies = OPEN, is_held
        elif weight.device.type != "cpu" and weight.is_inference():
            reason = UNVERSIONED
        elif weight.device.type == "cpu" and is_borrowed:
            mappings = mappings or _mappings()
            reason = _why_written(weight, mappings)
        if reason:
            lasts = functools.partial(still_applies, storage_ref)
            doubts[owner.storage] = Doubt(owner.storage, weight.nbytes, reason, lasts)
    return list(doubts.values())


def note_holders(weights: Sequence[torch.Tensor]) -> None:
    """Note tensors and arrays that share the weights' memory and count no versions with them.

    Examples are a flat vector whose parts are parameters (`vector_to_parameters`), or an array of
    another library. All Python objects are searched for tensors only if a storage has more holders
    than these weights.
    """
    owners = any_reader().owners(weights)
    weight_ids = {id(weight) for weight in weights}
    counters = {owner.counter for owner in owners}
    handles = {owner.storage: open_storage(w) for w, owner in zip(weights, owners, strict=True)}
    tensors = Counter(s for _, s in {(owner.counter, owner.storage) for owner in owners})
    shared = {s for s, handle in handles.items() if count_holders(handle) > tensors[s] + OWN - 1}
    if not shared:
        return
    objects = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
    explained_count: Counter[int] = Counter()
    single_use: dict[int, list[torch.Tensor]] = {}
    for tensor, owner in zip(objects, any_reader().owners(objects), strict=True):
        if owner.storage not in shared:
            continue
        if id(tensor) in weight_ids:
            explained_count[owner.storage] += 1
        elif tensor._use_count() == 1:  # else a capsule of DLPack holds it, or a view of it
            explained_count[owner.storage] += 1
            single_use.setdefault(owner.storage, []).append(tensor)
        if owner.counter not in counters:
            weight_access.note_alias(tensor, owner.storage)
    del objects
    for storage in shared:
        handle, explained = weakref.ref(handles[storage]), explained_count[storage] + OWN - 1
        if not handles[storage].resizable():  # as numpy() leaves it
            explained -= _without_referrer(single_use.get(storage, []))
        if count_holders(handles[storage]) > explained:
            lasts = functools.partial(has_more_holders, handle, explained)
            weight_access.doubt(storage, lasts)


def _without_referrer(tensors: list[torch.Tensor]) -> int:
    """Return how many tensors no container holds.

    They belong to arrays of numpy, which Python's garbage collector does not list.
    """
    if not tensors:
        return 0
    referrers = [r for r in gc.get_referrers(*tensors) if r is not tensors]
    held = {id(o) for referrer in referrers for o in gc.get_referents(referrer)}
    return sum(id(tensor) not in held for tensor in tensors)


class _Mapping(NamedTuple):
    """A mapping of this process's memory: its addresses, and whether it is shared or a file."""

    begin: int
    end: int
    is_shared: bool
    is_file: bool


def _mappings() -> list[_Mapping]:
    """Return the mappings of this process's memory, none where the system does not list them."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    mappings = []
    for line in lines:
        addresses, permissions, _, _, _, *path = line.split(maxsplit=5)
        begin, _, end = addresses.partition("-")
        is_file = bool(path) and path[0].startswith("/")
        mappings.append(_Mapping(int(begin, 16), int(end, 16), permissions[3] == "s", is_file))
    return mappings


def _why_written(weight: torch.Tensor, mappings: Sequence[_Mapping]) -> str:
    """Return why memory that torch did not allocate may be written; "" if it may not be."""
    if torch.cuda.is_available() and weight.is_pinned():
        return ""
    address = weight.data_ptr()
    for mapping in mappings:
        if mapping.begin <= address < mapping.end:
            if mapping.is_shared:
                return SHARED
            return "" if mapping.is_file else BORROWED
    return BORROWED
