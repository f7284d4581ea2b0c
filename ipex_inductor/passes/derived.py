"""Results of a graph's weight-only programs: when they are computed again, and what shares them.

A weight has changed if its identity, version or address has, if an access that counts no version
wrote it (`weight_access`), or if a sample of its contents differs, drawn anew at each call. It or
its storage may have died, and identity or address passed on: both are watched. Weights are never
held. Those whose storage is released (`templates/freed.py`) hold what was computed from them.

Computing pays for weights that stay. If they change again and again before the cost was paid back,
or another process may write them, the graph that reads plain weights is asked for (`PlainGraph`).
"""

import contextlib
import itertools
import math
import threading
import time
import weakref
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch

from ipex_inductor import compat, decisions
from ipex_inductor.errors import ArgumentError, DroppedWeightError
from ipex_inductor.passes import weight_access
from ipex_inductor.passes.program import Program
from ipex_inductor.passes.weight_access import open_storage
from ipex_inductor.passes.weight_doubts import FULL, lasting_doubts, note_holders
from ipex_inductor.passes.weight_reader import any_reader
from ipex_inductor.templates import freed
from ipex_inductor.templates.weights_cpp import FACTS, SAME, Changed, Contents, Hashes
from ipex_inductor.weight_memory import available_memory, begin_room, give_back

UNPAID = 3  # times that weights change before computing was paid back, until plain ones are read
MOST_CALLS = 1000  # for which weights must stay before results are computed from them again
SWEEP = 56  # calls in which the contents of small weights are compared whole
LEAST, MOST = 1 << 12, 1 << 17  # bytes compared in turn at a call: 0.3 and 8 microseconds
SAMPLE = 512  # of these bytes, that the sample of a weight takes the time of

_lock = threading.RLock()  # around all computing; callbacks of weak references never take it
_shared: "weakref.WeakValueDictionary[Any, _Part]" = weakref.WeakValueDictionary()
_made: ContextVar["list[DerivedWeights] | None"] = ContextVar("derived weights made", default=None)


class PlainGraph(Exception):
    """Asks for the graph that reads plain weights.

    Attributes:
        weights: those that the results would have been computed from.
        calls: how many calls they must stay as they are before results are computed again.
        resume: allows that; to be called then.
    """

    def __init__(
        self,
        weights: tuple[torch.Tensor, ...],
        calls: int,
        reason: str,
        resume: Callable[[], None],
    ) -> None:
        super().__init__(reason)
        self.weights, self.calls, self.resume = weights, calls, resume


@contextlib.contextmanager
def collecting() -> Iterator["list[DerivedWeights]"]:
    """Collect the `DerivedWeights` that are made inside, as of the graph that is compiled there."""
    made: list[DerivedWeights] = []
    token = _made.set(made)
    try:
        yield made
    finally:
        _made.reset(token)


class DerivedWeights:
    """The results of one graph's programs, for each of the models that share the graph.

    Graphs that run the same program on the same weights share its results.

    Args:
        captured: CUDA graphs read the results, so new ones are written to the old addresses.
    """

    def __init__(self, programs: Sequence[Program], captured: bool) -> None:
        self._numbers = numbers = sorted({i for program in programs for i in program.inputs})
        self._ends = (numbers[0], numbers[-1]) if numbers else ()
        self._weights = taking(numbers)
        self._programs = [(p, taking([numbers.index(i) for i in p.inputs])) for p in programs]
        known = all(program.is_known for program in programs)
        self._unanalysed = compat.unanalysed if known else contextlib.nullcontext
        self._captured = captured
        self._changed: Changed = _never_read  # with the first results, its reader is built
        self._snapshots: OrderedDict[tuple[int, ...], _Snapshot] = OrderedDict()
        self._by_ends: dict[tuple[int, ...], _Snapshot] = {}
        self._seconds = 0.0  # that computing all results took
        self._call_seconds = math.inf  # that a call of the graph took
        self.computed_now = False  # in this call; the caller times the graph then
        self.has_plain_graph = False  # whether the caller understands `PlainGraph`
        self.left: list[_Part] = []  # of a model of which a weight died, until the next is computed
        made = _made.get()
        if made is not None:
            made.append(self)

    def of(self, inputs: list[Any]) -> list[torch.Tensor]:
        """Return the results for these graph inputs, in the order of the programs.

        Raises `PlainGraph` if that is allowed and computing them does not pay or is not safe.
        """
        snapshot = self._by_ends.get(tuple([id(inputs[n]) for n in self._ends]))
        if snapshot is not None and weight_access.is_quiet():
            current = snapshot.current  # read once: another thread may replace it
            if current is not None and self._is_current(snapshot, current, inputs):
                snapshot.calls += 1
                return current.values
        with _lock, self._unanalysed():
            return self._settle(inputs)

    def note_call(self, seconds: float) -> None:
        """Note how long the graph took behind results that were computed."""
        self._call_seconds = min(self._call_seconds, seconds)
        self.computed_now = False

    def _is_current(self, snapshot: "_Snapshot", current: "_Current", inputs: list[Any]) -> bool:
        """Compare facts and samples of contents; outdate results whose weights differ."""
        found = self._changed(inputs, current.read, current.contents, current.limit)
        if found not in (SAME, FACTS):
            _warn_unseen(inputs[self._numbers[found]])
            for part in snapshot.parts:  # what wrote one weight may have written others
                if not part.is_current():
                    part.outdate_storages()
        return found == SAME

    def _settle(self, inputs: list[Any]) -> list[torch.Tensor]:
        if self._changed is _never_read:
            self._changed = any_reader().changed(self._numbers)
        weights = self._weights(inputs)
        in_doubt = weight_access.settle()
        snapshot = self._snapshots.get(tuple(map(id, weights)))
        if snapshot is None:
            return self._compute(weights, self._begin(weights))
        self._by_ends[tuple([id(inputs[n]) for n in self._ends])] = snapshot
        self._snapshots.move_to_end(snapshot.key)
        if in_doubt and self.has_plain_graph:
            doubtful = [w for w in weights if any_reader().storage_of(w) in in_doubt]
            if sum(w.nbytes for w in doubtful) > FULL:
                reason = "their memory was handed out, and may be written at any time"
                raise snapshot.left(weights, MOST_CALLS, reason)
        current = snapshot.current
        if current is not None and self._is_current(snapshot, current, inputs):
            snapshot.calls += 1
            return current.values
        return self._compute(weights, snapshot)

    def _begin(self, weights: tuple[torch.Tensor, ...]) -> "_Snapshot":
        """Return an empty snapshot for a model that is new to the graph."""
        self._make_room()
        snapshot = _Snapshot(self, tuple(map(id, weights)))
        self._snapshots[snapshot.key] = snapshot
        if self._ends:
            self._by_ends[snapshot.ends] = snapshot
        return snapshot

    def _make_room(self) -> None:
        """Drop the models that were not used for longest while memory is scarce."""
        while self._snapshots:
            oldest = next(iter(self._snapshots.values()))
            if available_memory(oldest.device) > 2 * oldest.size:
                return
            self.drop(oldest)

    def drop(self, snapshot: "_Snapshot") -> None:
        """Drop the results for one model; nothing else holds those that only this graph uses."""
        self._snapshots.pop(snapshot.key, None)
        if self._by_ends.get(snapshot.ends) is snapshot:
            self._by_ends.pop(snapshot.ends, None)

    def _compute(
        self, weights: tuple[torch.Tensor, ...], snapshot: "_Snapshot"
    ) -> list[torch.Tensor]:
        doubts = lasting_doubts(weights)
        storages = [open_storage(w) for w in weights]  # held: no address changes its owner
        read = any_reader().read(weights)
        if self.has_plain_graph and sum(doubt.size for doubt in doubts) > FULL:
            raise snapshot.left(weights, MOST_CALLS, doubts[0].reason)
        parts = [
            _shared_part(program, own(snapshot.key), self._captured)
            for program, own in self._programs
        ]
        states = [_state_of_part(read, own) for _, own in self._programs]
        outdated = [n for n, part in enumerate(parts) if not part.is_of(states[n])]
        if outdated:
            self._refuse_unstable(weights, snapshot)
        began = time.perf_counter()
        # First what shows writes: one that falls into the computing is seen at the next call.
        for n in outdated:
            parts[n].observe(self._programs[n][1](weights), states[n])
        if outdated:
            note_holders(weights)
        for doubt in doubts:
            weight_access.doubt(doubt.storage, doubt.lasts)
        values = self._run(weights, parts)
        snapshot.hold(parts)
        self.left = []
        if outdated:
            self._seconds = time.perf_counter() - began
            self.computed_now = True
        if read and read == any_reader().read(weights):
            read = self._freed(parts, weights, read)
            contents = self._contents(parts, len(weights))
            limit = _limit(contents, weights)
            snapshot.current = _Current(read, contents, values, limit)
        else:  # no plain storage, or another thread wrote meanwhile
            for part in parts:
                part.outdate()
        if outdated and snapshot.is_new:
            give_back()  # what was needed on the way, and weights whose storage is released
        snapshot.is_new = False
        del storages
        return values

    def _run(
        self,
        weights: tuple[torch.Tensor, ...],
        parts: "Sequence[_Part]",
    ) -> list[torch.Tensor]:
        values: list[torch.Tensor] = []
        _synchronize(weights)  # a stream may still read what is written over or freed now
        begin_room()
        for part, (_, own) in zip(parts, self._programs, strict=True):
            values += part.update(own(weights))
        _synchronize(weights)  # another stream may read it next
        return values

    def _refuse_unstable(self, weights: tuple[torch.Tensor, ...], snapshot: "_Snapshot") -> None:
        """Raise `PlainGraph` if the weights changed too often before computing was paid back."""
        if snapshot.is_new or snapshot.resumes:
            snapshot.resumes = False
            return
        calls = min(MOST_CALLS, math.ceil(self._seconds / self._call_seconds) or 1)
        snapshot.unpaid = snapshot.unpaid + 1 if snapshot.calls < calls else 0
        snapshot.calls = 0
        if self.has_plain_graph and snapshot.unpaid >= UNPAID:
            reason = f"they changed {UNPAID} times within fewer calls than computing pays for"
            raise snapshot.left(weights, calls, reason)

    def _contents(self, parts: "Sequence[_Part]", count: int) -> Contents | None:
        """Return the contents that the results were computed from, in the order of the weights."""
        found: list[Hashes | None] = [None] * count
        for part, (_, own) in zip(parts, self._programs, strict=True):
            for number, hashes in zip(own(range(count)), part.hashes, strict=True):
                found[number] = found[number] or hashes
        return Contents(found) if any(found) else None

    def _freed(
        self, parts: "Sequence[_Part]", weights: tuple[torch.Tensor, ...], read: bytes
    ) -> bytes:
        """Release what is to be dropped and read by nothing else; return what is read then."""
        if not any(program.drops for program, _ in self._programs):
            return read
        readers = Counter(a for part in list(_shared.values()) for a in {*_addresses(part)})
        gone = False
        for part, (program, own) in zip(parts, self._programs, strict=True):
            if not program.drops:
                continue
            if all(readers[a] == 1 for a in _addresses(part)):
                gone |= part.free_weights(own(weights))
            else:
                decisions.log.info("plain weights are not freed: another graph derives from them")
        if not gone:
            return read
        before, now = (memoryview(b).cast("q").tolist() for b in (read, any_reader().read(weights)))
        for n, weight in enumerate(weights):
            if not freed.is_freed(weight):  # as it was when it was read
                for block in (len(weights), 2 * len(weights)):
                    now[block + n] = before[block + n]
        return array("q", now).tobytes()


@dataclass(frozen=True)
class _Current:
    """Results that are up to date, and what was read of the weights; replaced whole.

    Attributes:
        limit: bytes of contents that are compared in turn at each call.
    """

    read: bytes
    contents: Contents | None
    values: list[torch.Tensor]
    limit: int


def _limit(contents: Contents | None, weights: Sequence[torch.Tensor]) -> int:
    """Return how many bytes of contents are compared in turn: all, of few."""
    if contents is None:
        return 0
    total = contents.total
    if total <= (FULL if any(w.is_inference() for w in weights) else MOST // 4):
        return total
    most = max(MOST - SAMPLE * len(weights), MOST // 4)
    return min(max(total // SWEEP, LEAST), most)


class _Snapshot:
    """One graph's results for one model.

    Attributes:
        calls: made since the results were computed.
        unpaid: how often in a row they were outdated before computing was paid back.
        resumes: whether they may be computed though they were not paid back before.
    """

    def __init__(self, owner: DerivedWeights, key: tuple[int, ...]) -> None:
        self.key = key
        self.ends = (key[0], key[-1]) if key else ()
        self.parts: list[_Part] = []
        self.current: _Current | None = None
        self.is_new, self.resumes = True, False
        self.calls = self.unpaid = 0
        self._owner = weakref.ref(owner)

    def hold(self, parts: "Sequence[_Part]") -> None:
        """Hold `parts`, and learn when they are outdated."""
        self.parts = list(parts)
        for part in parts:
            users = (user for user in part.users if user() not in (None, self))
            part.users = (*users, weakref.ref(self))

    def left(self, weights: tuple[torch.Tensor, ...], calls: int, reason: str) -> PlainGraph:
        """Give up the results; return the request for the graph without them."""
        for part in self.parts:
            part.outdate()
        self.current = None
        return PlainGraph(weights, calls, reason, self.resume)

    def resume(self) -> None:
        """Allow results to be computed once more; the next time unpaid ends that."""
        self.resumes, self.unpaid = True, UNPAID - 1

    def die(self) -> None:
        """Leave the graph, as a weight of the model died."""
        self.current = None
        owner = self._owner()
        if owner is not None:
            owner.left = self.parts  # those of weights that live on serve the model that follows
            owner.drop(self)

    @property
    def size(self) -> int:
        """The bytes of the results."""
        return sum(value.nbytes for part in self.parts for value in part.values)

    @property
    def device(self) -> torch.device:
        """Where the results lie."""
        devices = (value.device for part in self.parts for value in part.values)
        return next(devices, torch.device("cpu"))


_State = tuple[int, ...]  # versions, then addresses


class _Part:
    """What one program returned for one set of weights; it lives as long as a snapshot holds it.

    Attributes:
        hashes: the contents of each weight that it was computed from; None: not compared.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.captured = False
        self.values: list[torch.Tensor] = []
        self.hashes: list[Hashes | None] = [None] * len(program.inputs)
        self.storages: list[weakref.ref[torch.UntypedStorage]] = []
        self.users: tuple[weakref.ref[_Snapshot], ...] = ()
        self._watched: tuple[int, ...] = ()  # addresses of the weights' storages
        self._weights: list[weakref.ref[_Life]] = []
        self._own: list[torch.Tensor] = []  # the values whose storage is no weight's
        self._state: _State | None = None
        self._ran = False  # on the weights in that state
        self._alone = False  # the weights' storage is released: nothing is left to compute from

    def is_of(self, state: _State) -> bool:
        """Return whether the values are those of weights in that state."""
        return bool(state) and self._state == state

    def observe(self, weights: Sequence[torch.Tensor], state: _State) -> None:
        """Note the contents of `weights`, and accesses to them from now on.

        Raises `DroppedWeightError` if a weight's storage is released.
        """
        if any(map(freed.is_freed, weights)):
            came = "one that was packed otherwise, as for other sizes, and freed"
            raise DroppedWeightError("a weight with data", came, freed.TODO)
        self._alone = False
        for weight in weights:
            _life(weight).parts = [part for part in _life(weight).parts if part is not self]
        self.storages, self._weights = [], []  # what happens to the old ones no longer matters
        self.drop()
        storages = [open_storage(w) for w in weights]
        self.storages = [weakref.ref(s, _calls(self, _Part.drop)) for s in storages]
        self._weights = [weakref.ref(_life(w), _calls(self, _Part.free)) for w in weights]
        self._watched = tuple({s._cdata for s in storages})
        weight_access.watch(weights, self)
        self.hashes = [_hashes(weight) for weight in weights]
        self._state, self._ran = state, False

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
        self._own = [v for v in values if _storage(v) not in storages]
        return values

    def free_weights(self, weights: Sequence[torch.Tensor]) -> bool:
        """Release the weights' storage if nothing else has it; return whether that was done."""
        if self._alone or len(self._own) < len(self.values):
            return False
        if why := freed.free(weights):
            decisions.log.info("plain weights are not freed: %s", why)
            return False
        self._state = _state_of_part(any_reader().read(tuple(weights)), tuple)
        self._alone, self.hashes = True, [None] * len(weights)
        for user in self.users:  # they know the weights by where they lay
            if (snapshot := user()) is not None:
                snapshot.current = None
        for weight in weights:
            _life(weight).parts.append(self)
        return True

    def is_current(self) -> bool:
        """Return whether all contents that the values were computed from are as they were."""
        if self._alone:
            return True
        for hashes, ref in zip(self.hashes, self.storages, strict=False):
            storage = ref()
            if hashes is None or storage is None or not _holds(storage, hashes):
                return False
            if any_reader().hashes(hashes.address, hashes.size).words != hashes.words:
                return False
        return True

    def outdate(self) -> int:
        """As `drop`, if the values can be computed again."""
        return 0 if self._alone else self.drop()

    def outdate_storages(self) -> None:
        """Outdate all results computed from weights in these storages, of other graphs too."""
        for storage in self._watched:
            weight_access.outdate(storage)

    def drop(self) -> int:
        """Have the values computed again at their next use; return how many were up to date."""
        valid = len(self.values) if self._state else 0
        self._state = None
        weight_access.unwatch(self._watched, self)
        for user in self.users:
            snapshot = user()
            if snapshot is not None:
                snapshot.current = None
        if not self.captured:
            self.values, self._own = [], []
        return valid

    def free(self) -> None:
        """Drop the values and their addresses: nothing can ask for them again."""
        self.drop()
        self.values, self._own = [], []
        for user in self.users:
            snapshot = user()
            if snapshot is not None:
                snapshot.die()


class _Life:
    """Carried by a weight, and dead with it.

    A weak reference to the weight itself would keep users from `torch.utils.swap_tensors`, which
    `module.to` and `load_state_dict` may use.
    """

    __slots__ = ("__weakref__", "parts")

    def __init__(self) -> None:
        self.parts: list[_Part] = []  # computed from a weight whose storage is released

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return OrderedDict, ()  # a saved weight is loaded without this package


def _life(weight: torch.Tensor) -> _Life:
    carried = vars(weight)
    if not isinstance(carried.get("_ipex_life"), _Life):
        carried["_ipex_life"] = _Life()
    life: _Life = carried["_ipex_life"]
    return life


def _calls(part: _Part, method: Callable[[_Part], object]) -> Callable[[object], None]:
    """Return a callback that does not keep `part` alive."""
    weak = weakref.ref(part)

    def call(_: object) -> None:
        alive = weak()
        if alive is not None:
            method(alive)

    return call


def refresh(model: torch.nn.Module | None) -> int:
    """See `ipex_inductor.refresh`."""
    if not isinstance(model, torch.nn.Module | None):
        raise ArgumentError(
            "a module, a compiled module, or None for all weights",
            f"a {type(model).__name__}",
            "Pass the model whose weights were written.",
        )
    with _lock:
        parts = list(_shared.values())
        if model is not None:
            tensors = itertools.chain(model.parameters(), model.buffers())
            written = {s._cdata for s in map(_storage, tensors) if s is not None}
            parts = [part for part in parts if not written.isdisjoint(_addresses(part))]
        return sum(part.outdate() for part in parts)


def derived_memory() -> int:
    """See `ipex_inductor.derived_memory`."""
    with _lock:
        values = [value for part in list(_shared.values()) for value in part.values]
    storages = {s._cdata: s.nbytes() for s in map(_storage, values) if s is not None}
    return sum(storages.values()) + sum(v.nbytes for v in values if _storage(v) is None)


def taking(numbers: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Return a function that returns the values with these numbers."""
    if len(numbers) < 2:
        return lambda values: tuple([values[number] for number in numbers])
    return itemgetter(*numbers)


def _shared_part(program: Program, key: tuple[int, ...], captured: bool) -> _Part:
    """Return the part of the weights with these identities, shared by the process's graphs."""
    part = _shared.setdefault((program.text, key), _Part(program))
    part.captured |= captured
    return part


def _state_of_part(read: bytes, own: Callable[[Sequence[Any]], tuple[Any, ...]]) -> _State:
    """Return what was read of the weights of a part, which is found by their identities."""
    numbers = memoryview(read).cast("q").tolist()
    count = len(numbers) // 3
    blocks = numbers[count : 2 * count], numbers[2 * count :]
    return tuple(n for block in blocks for n in own(block)) if numbers else ()


def _hashes(weight: torch.Tensor) -> Hashes | None:
    """Return the contents of a weight's memory; None if it is not on a CPU or has none."""
    if weight.device.type != "cpu" or not weight.numel():
        return None
    steps = zip(weight.shape, weight.stride(), strict=True)
    elements = 1 + sum((size - 1) * stride for size, stride in steps)
    return any_reader().hashes(weight.data_ptr(), elements * weight.element_size())


def _holds(storage: torch.UntypedStorage, hashes: Hashes) -> bool:
    """Return whether that memory still is the storage's."""
    begin = storage.data_ptr()
    return begin <= hashes.address and hashes.address + hashes.size <= begin + storage.nbytes()


def _warn_unseen(weight: torch.Tensor) -> None:
    decisions.warn_once(
        f"a weight of shape {tuple(weight.shape)} was written in a way that torch does not see (by "
        "a raw pointer or by another process). From this call on its new values are used; results "
        "of a few calls before may have been those of its old ones. Call "
        "ipex_inductor.refresh(model) after such writes."
    )


def _synchronize(weights: Sequence[torch.Tensor]) -> None:
    """Wait for all streams of the devices of `weights`, unless one of them is being captured."""
    for device in {w.device for w in weights if w.device.type != "cpu"}:
        if not (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            torch.accelerator.synchronize(device)


def _never_read(*_: Any) -> int:
    return FACTS


def _storage(value: torch.Tensor) -> torch.UntypedStorage | None:
    """Return the storage, None for oneDNN's opaque tensors."""
    return open_storage(value) if value.layout == torch.strided else None


def _addresses(part: _Part) -> list[int]:
    return [storage._cdata for storage in (ref() for ref in part.storages) if storage is not None]


def _settle(
    old: list[torch.Tensor], new: list[torch.Tensor], own: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Return the new values, at the old addresses where they fit.

    Args:
        own: the old values that share no storage with a weight.
    """

    def fits(a: torch.Tensor, b: torch.Tensor) -> bool:
        same = a is not b and a.device == b.device and a.dtype == b.dtype and a.shape == b.shape
        strided = a.layout == b.layout == torch.strided
        return same and strided and a.stride() == b.stride() and any(a is o for o in own)

    with torch.inference_mode(False), torch.no_grad():
        return [a.copy_(b) if fits(a, b) else b for a, b in zip(old or new, new, strict=True)]
