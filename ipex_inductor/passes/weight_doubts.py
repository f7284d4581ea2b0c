"""Find weights whose memory something else can write without torch's noticing.

Memory that torch allocated itself is written through torch, and so is a file that is mapped for this
process alone. Shared memory has writers in other processes. Memory that another library allocated
(numpy, DLPack, a buffer of Python's) has writers that torch does not know.
"""

import functools
import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from ipex_inductor.passes import weight_access
from ipex_inductor.passes.weight_access import count_holders, open_storage
from ipex_inductor.passes.weight_reader import any_reader

FULL = 1 << 18  # bytes whose contents are compared whole at each call: some 20 microseconds
OWN = 2  # references to a storage: that of one tensor, and that of its object in Python
SHARED = "they lie in shared memory, which another process may write at any time"
BORROWED = "their memory belongs to another library (numpy, DLPack), which may write it at any time"
LENT = "a numpy array shares their memory, and may write it at any time"


class Doubt(NamedTuple):
    """A storage that may be written unseen as long as `lasts()`."""

    storage: int
    size: int  # bytes of the weight in it
    reason: str
    lasts: Callable[[], bool]


def lasting_doubts(weights: Sequence[torch.Tensor]) -> list[Doubt]:
    """Return the weights on the CPU that something else may write."""
    reader = any_reader()
    on_cpu = [w for w in weights if w.device.type == "cpu" and w.numel()]
    others: dict[int, tuple[torch.Tensor, bool]] = {}
    for weight, owner in zip(on_cpu, reader.owners(on_cpu), strict=True):
        if owner.deleter != reader.allocator or not open_storage(weight).resizable():
            others[owner.storage] = (weight, owner.deleter == reader.allocator)
    if not others:
        return []
    mappings = _mappings()
    doubts = []
    for storage, (weight, is_torchs) in others.items():
        if is_torchs and reader.allocator:
            if count_holders(storage) > OWN:  # numpy() makes a storage keep its size for good
                lasts = functools.partial(_has_holders, storage)
                doubts.append(Doubt(storage, weight.nbytes, LENT, lasts))
        elif reason := _why_written(weight, mappings):
            doubts.append(Doubt(storage, weight.nbytes, reason, _always))
    return doubts


def note_aliases(weights: Sequence[torch.Tensor]) -> None:
    """Note the tensors that share the weights' memory and count versions of their own.

    As of a flat vector whose parts parameters are (`vector_to_parameters`). Tensors are looked for
    among all objects of Python, only if a storage has more holders than these weights.
    """
    owners = any_reader().owners(weights)
    counters = {owner.counter for owner in owners}
    expected: dict[int, int] = {}
    for owner in {owner.counter: owner for owner in owners}.values():
        expected[owner.storage] = expected.get(owner.storage, OWN - 1) + 1
    shared = {s for s, count in expected.items() if s and count_holders(s) > count}
    if not shared:
        return
    tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
    for tensor, owner in zip(tensors, any_reader().owners(tensors), strict=True):
        if owner.storage in shared and owner.counter not in counters:
            weight_access.note_alias(tensor, owner.storage)


def _has_holders(storage: int) -> bool:
    return count_holders(storage) > OWN


def _always() -> bool:
    return True


class _Mapping(NamedTuple):
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
    found = []
    for line in lines:
        addresses, permissions, _, _, _, *path = line.split(maxsplit=5)
        begin, _, end = addresses.partition("-")
        is_file = bool(path) and path[0].startswith("/")
        found.append(_Mapping(int(begin, 16), int(end, 16), permissions[3] == "s", is_file))
    return found


def _why_written(weight: torch.Tensor, mappings: Sequence[_Mapping]) -> str:
    """Return why memory that torch did not allocate may be written; "" if it is this process's."""
    if torch.cuda.is_available() and weight.is_pinned():
        return ""
    address = weight.data_ptr()
    for mapping in mappings:
        if mapping.begin <= address < mapping.end:
            if mapping.is_shared:
                return SHARED
            return "" if mapping.is_file else BORROWED
    return BORROWED
