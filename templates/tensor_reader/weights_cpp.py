"""Identity, version, address and contents of hundreds of weights, read by one call of C++."""

import ctypes
import functools
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ipex_inductor import compat
from ipex_inductor.aot_cache.key import pairs
from ipex_inductor.compat import private_memory
from ipex_inductor.compat.private_memory import WORD
from ipex_inductor.templates.build.cpp import NotBuiltError, load, require_found
from ipex_inductor.templates.tensor_reader.look_cpp import address_of
from ipex_inductor.templates.tensor_reader.write_watch import WatchedPages

# As in weights.cpp: bytes that share one hash, and bytes that one query to the kernel covers.
BLOCK, ASK = 128, 1 << 22
SAME, FACTS = -1, -2  # results of `Changed`; others number a weight whose contents differ
# Takes inputs of a graph, what `read` returned, and contents or None; `Reader.make_comparer` says
# what it returns.
Changed = Callable[[list[Any], bytes, "Contents | None"], int]


@dataclass(frozen=True)
class Hashes:
    """The contents of one weight's memory: a hash for each block from `address` on.

    Attributes:
        address: of the first byte.
        size: bytes.
        words: the hashes.
        pages: the whole pages inside of the weight whose writes the kernel notes; None: none.
        in_turn: whether `pages` are also compared in turn, as the kernel does not note every write:
            another process may change a mapped file, and a device may write.
    """

    address: int
    size: int  # bytes
    words: bytes
    pages: WatchedPages | None = None
    in_turn: bool = False

    @property
    def blocks(self) -> int:
        """Return the number of hashes."""
        return -(-self.size // BLOCK)


class Contents:
    """The contents of several weights, in the order of `Reader.make_comparer`; None: not compared.

    Args:
        weights: the contents when the results in use were computed from them.
        limits: bytes compared in turn at each call, after a sample of each weight: of memory that
            the kernel does not watch, and of all memory in a forked process, where it watches none.
            If the first is at least the size of all, all are compared.
        asks: pieces of watched weights whose writes are queried from the kernel at each call.
    """

    def __init__(
        self, weights: Sequence[Hashes | None], limits: tuple[int, int], asks: int = 0
    ) -> None:
        total = sum(w.blocks for w in weights if w) * BLOCK  # bytes
        self.weights = tuple(weights)  # C++ reads their words
        self.total, self.limits, self.asks = total, limits, asks
        watched = [w.pages for w in weights if w and w.pages]
        self._kernel = watched[0].kernel if watched else None
        pagemap = self._kernel.pagemap if self._kernel else 0
        numbers = [len(weights), total, *limits, asks, pagemap]
        numbers += [time.perf_counter_ns() | 1, 0, 0, 0, 0]
        for weight in weights:
            hash_address = (
                ctypes.cast(ctypes.c_char_p(weight.words), ctypes.c_void_p) if weight else None
            )
            if weight is None or hash_address is None or not hash_address.value:
                numbers += [0] * 6
                continue
            pages = weight.pages
            ends = (pages.begin, pages.begin + pages.size) if pages else (0, 0)
            numbers += [weight.address, weight.size, hash_address.value, *ends, weight.in_turn]
        self.numbers = array("q", numbers)
        self.address = self.numbers.buffer_info()[0]

    def protect(self, number: int) -> None:
        """Have the kernel note writes to a weight from now on, if it watches that weight.

        Raises `UnwatchableError` if other memory has been mapped there.
        """
        weight = self.weights[number]
        if weight is not None and weight.pages is not None:
            weight.pages.protect()

    @property
    def unwatched_bytes(self) -> int:
        """Return the bytes whose writes the kernel does not note."""
        return self.total - sum(w.pages.size for w in self.weights if w and w.pages)


class Owner(NamedTuple):
    """Addresses of what a tensor shares with others; 0 if it has none."""

    counter: int  # of its version
    storage: int
    deleter: int  # the function that frees the storage's memory


@dataclass(frozen=True)
class Reader:
    """C++ functions that read tensors."""

    read: Callable[[tuple[torch.Tensor, ...]], bytes]
    """Return identities, versions (-1: inference tensor) and addresses, a block of int64 each.

    No bytes where a tensor has no plain storage.
    """
    _owners: Callable[[tuple[torch.Tensor, ...]], bytes]
    _counters: Callable[[tuple[torch.Tensor, ...]], bytes]
    _changed: Callable[..., int]
    _hash: Callable[..., None]
    storage_of: Callable[[torch.Tensor], int]
    """Return where a tensor's storage lies, 0 if it has none; nothing of a subclass's runs."""
    allocator: int = 0
    """The function that frees what torch allocates on a CPU."""

    def owners(self, tensors: Sequence[torch.Tensor]) -> "list[Owner]":
        """Return the version counter, the storage and its deleter of each tensor."""
        numbers = memoryview(self._owners(tuple(tensors))).cast("q").tolist()
        count = len(tensors)
        blocks = (numbers[n * count : (n + 1) * count] for n in range(3))
        return list(map(Owner, *blocks))

    def counters(self, tensors: tuple[torch.Tensor, ...]) -> bytes:
        """Return the version of each tensor, then how many tensors share its counter."""
        return self._counters(tensors)

    def make_comparer(self, numbers: Sequence[int]) -> Changed:
        """Return a function that compares the graph inputs at the positions `numbers`.

        It returns `SAME`, `FACTS` if an identity, version or address differs, or the position in
        `numbers` of a weight whose contents differ or which the kernel saw written.
        """
        array = (ctypes.c_int64 * len(numbers))(*numbers)
        call = functools.partial(self._changed, array, len(numbers))

        def compare(inputs: list[Any], read: bytes, contents: Contents | None) -> int:
            return call(inputs, read, contents.address if contents else None)

        return compare

    def hashes(self, address: int, size: int) -> Hashes:
        """Return the contents of `size` bytes of this process's memory."""
        block_hashes = bytes(4 * -(-size // BLOCK))
        self._hash(address, size, block_hashes)
        return Hashes(address, size, block_hashes)


@functools.cache
def reader() -> Reader | None:
    """Return the functions, or None if they cannot be built or do not read what torch reads."""
    try:
        return _reader()
    except NotBuiltError:
        return None


def _reader() -> Reader:
    offsets = _places()  # kept alive by the functions that hold it
    source = Path(__file__).with_name("weights.cpp").read_text
    library = load(source, pairs({"template": "weights"}), portable=True)
    pointer, thing, number = ctypes.c_void_p, ctypes.py_object, ctypes.c_int64
    read = ctypes.PYFUNCTYPE(thing, pointer, thing)  # holds Python's lock
    changed = ctypes.PYFUNCTYPE(number, pointer, pointer, number, thing, thing, pointer)
    hashed = ctypes.CFUNCTYPE(None, pointer, number, ctypes.c_char_p)
    stored = ctypes.PYFUNCTYPE(number, pointer, thing)
    built = Reader(
        functools.partial(read(address_of(library.state)), ctypes.byref(offsets)),
        functools.partial(read(address_of(library.owners)), ctypes.byref(offsets)),
        functools.partial(read(address_of(library.counters)), ctypes.byref(offsets)),
        functools.partial(changed(address_of(library.changed)), ctypes.byref(offsets)),
        hashed(address_of(library.hash_blocks)),
        functools.partial(stored(address_of(library.storage_of)), ctypes.byref(offsets)),
    )
    _check(built)
    (owner,) = built.owners([torch.empty(1, device="cpu")])
    return replace(built, allocator=owner.deleter)


class _Places(ctypes.Structure):
    """`Places` of weights.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("impl", "version", "storage", "offset", "dtype")),
        *((name, ctypes.c_int64) for name in ("number", "data", "deleter")),
        ("sizes", ctypes.c_int8 * 256),
    )


def _places() -> _Places:
    layout = require_found(private_memory.layout())
    impl_words = layout.version, layout.storage, layout.offset, layout.dtype
    impl_offsets = (WORD * word for word in impl_words)
    other_offsets = layout.count, WORD * layout.data, WORD * layout.deleter
    sizes = (ctypes.c_int8 * 256)(*layout.item_sizes)
    return _Places(layout.impl, *impl_offsets, *other_offsets, sizes)


def _check(built: Reader) -> None:
    """Raise `NotBuiltError` unless several kinds of tensors read as torch reads them."""
    with torch.inference_mode(False), torch.no_grad():
        base = torch.zeros(8, device="cpu")
        kinds = [base[2:], torch.nn.Parameter(base.clone()), torch.zeros(0, device="cpu")]
        for number, tensor in enumerate(kinds):
            for _ in range(3 * number + 1):
                tensor.add_(1)
        tensors = (*kinds, base)
    facts_read = built.read(tensors)
    facts = map(id, tensors), (t._version for t in tensors), (t.data_ptr() for t in tensors)
    right = [*memoryview(facts_read).cast("q")] == [number for block in facts for number in block]
    same = built.make_comparer(range(len(tensors)))([*tensors], facts_read, None) == SAME
    owners = built.owners(tensors)
    counters = [owner.counter for owner in owners]
    counters_differ = counters[0] == counters[3] and len({*counters}) == 3
    storages = [_storage(t) for t in tensors]
    stored = storages == [owner.storage for owner in owners] == [*map(built.storage_of, tensors)]
    versions = [*memoryview(built.counters(tensors)).cast("q")]
    counted = versions == [*(t._version for t in tensors), 2, 1, 1, 2]
    if not (right and same and counters_differ and stored and counted):
        raise NotBuiltError("a tensor's version or address is not where it was")


def _storage(tensor: torch.Tensor) -> int:
    return int(compat.open_storage(tensor)._cdata)
