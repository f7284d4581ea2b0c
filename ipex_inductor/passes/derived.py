"""What the prologue computed from weights: when that is out of date, and who shares it.

A weight has changed when its identity, version or address has. It or its storage may have died, and
identity or address passed on: both are watched. Weights are never held. Those whose data is freed
(`templates/freed.py`) hold what was derived from them.
"""

import contextlib
import ctypes
import itertools
import struct
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ipex_inductor import compat, decisions
from ipex_inductor.errors import ArgumentError, DroppedWeightError
from ipex_inductor.passes.program import Program
from ipex_inductor.templates import freed
from ipex_inductor.templates.weights_cpp import Reader, Same, reader
from ipex_inductor.weight_memory import begin_room, give_back

MANY = 32  # weights that are read in one call of C++, which must be built once
KEPT = 4  # models that may take turns in one graph before one of them is derived anew

# Optimizer steps, then identities, versions and addresses of the weights: a block of bytes each if
# Python read them one by one, one block of all if C++ did.
State = tuple[Any, ...]

_lock = threading.RLock()  # around all deriving; callbacks of weak references never take it
_shared: "weakref.WeakValueDictionary[Any, _Part]" = weakref.WeakValueDictionary()


class DerivedWeights:
    """The results of one graph's programs, for each of the models that take turns in it.

    Graphs that run the same program on the same weights share its results. `captured`: CUDA graphs
    read them, so new ones are written to the old addresses.
    """

    def __init__(self, programs: Sequence[Program], captured: bool) -> None:
        self._numbers = numbers = sorted({i for program in programs for i in program.inputs})
        self._weights = taking(numbers)
        self._programs = [(p, taking([numbers.index(i) for i in p.inputs])) for p in programs]
        known = all(program.is_known for program in programs)
        self._unanalysed = compat.unanalysed if known else contextlib.nullcontext
        self._captured = captured
        self._latest = _Snapshot()
        self._kept: dict[tuple[int, ...], _Snapshot] = {}
        # In C++, when there is something to derive; else Python's own way.
        self._reader: Reader | None = None
        self._same: Same | None = None

    def of(self, inputs: list[Any]) -> list[torch.Tensor]:
        """The results for these graph inputs, in the order of the programs."""
        current = self._latest.current  # read once: another thread may replace it
        if current is not None and self._is_still(current[0], inputs):
            return current[1]
        with _lock, self._unanalysed():
            return self._derive(self._weights(inputs))

    def _is_still(self, state: State, inputs: list[Any]) -> bool:
        """Whether that is the state of the weights among `inputs`."""
        if self._same is None or len(state) != 2:
            return state == _state(self._weights(inputs))
        steps, told = state
        return steps == _optimizer_steps and bool(self._same(inputs, told))

    def _derive(self, weights: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        storages = [w.untyped_storage() for w in weights]  # held: no address changes its owner
        self._read_by(weights)
        key, state = tuple(map(id, weights)), _state(weights, self._reader)
        kept = self._kept.get(key, self._latest)
        current = kept.current
        if current is not None and current[0] == state:
            self._latest = kept
            return current[1]
        snapshot, values, ran = _Snapshot(), [], False
        _synchronize(weights)  # a stream may still read what is written over or freed now
        begin_room()
        for program, own in self._programs:
            part = _shared_part(program, own(key), self._captured)
            its = state and _state_of_part(state, own)
            ran |= not part.is_of(its)
            values += part.update(own(weights), its)
            snapshot.hold(part)
        _synchronize(weights)  # another stream may read it next
        if state is not None and state == _state(weights, self._reader):
            state = self._freed(snapshot.parts, weights, state)
            snapshot.current = (state, values)
        else:  # versions are not counted, or another thread wrote meanwhile
            for part in snapshot.parts:
                part.forget()
        if ran and key not in self._kept:
            give_back()  # what was needed on the way, and weights that are freed
        del storages
        self._keep(key, snapshot)
        return values

    def _freed(
        self, parts: Sequence["_Part"], weights: tuple[torch.Tensor, ...], state: State
    ) -> State:
        """Free what is to be dropped and read by nothing else; the state of the weights then."""
        if not any(program.drops for program, _ in self._programs):
            return state
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
            return state
        self._read_by(weights)
        now = _state(weights)
        assert now is not None
        _, identities, versions, addresses = now
        steps, read, lay = _state_of_part(state, tuple)
        for n, weight in enumerate(weights):
            if not freed.is_freed(weight):  # as it was when it was read
                versions[n], addresses[n] = read[n], lay[n]
        return steps, identities, versions, addresses

    def _read_by(self, weights: tuple[torch.Tensor, ...]) -> None:
        """In C++ where that pays, if all of them have data."""
        pays = len(weights) >= MANY and not any(map(freed.is_freed, weights))
        self._reader = reader() if pays else None
        self._same = self._reader.same(self._numbers) if self._reader else None

    def _keep(self, key: tuple[int, ...], snapshot: "_Snapshot") -> None:
        self._kept.pop(key, None)
        self._kept[key] = self._latest = snapshot
        for oldest in list(self._kept)[:-KEPT]:
            del self._kept[oldest]


class _Snapshot:
    """One graph's parts for one model; `current` is replaced whole, never changed."""

    def __init__(self) -> None:
        self.parts: list[_Part] = []
        self.current: tuple[State, list[torch.Tensor]] | None = None

    def hold(self, part: "_Part") -> None:
        """Hold `part`, and be told when it is dropped."""
        self.parts.append(part)
        part.users = (*(user for user in part.users if user() is not None), weakref.ref(self))


class _Part:
    """What one program gave for one set of weights; it lives as long as a snapshot holds it."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.captured = False
        self.values: list[torch.Tensor] = []
        self.storages: list[weakref.ref[torch.UntypedStorage]] = []
        self.users: tuple[weakref.ref[_Snapshot], ...] = ()
        self._weights: list[weakref.ref[_Life]] = []
        self._own: list[torch.Tensor] = []  # the values whose storage is no weight's
        self._state: State | None = None
        self._alone = False  # the weights' data is freed: there is nothing to derive it from again

    def is_of(self, state: State | None) -> bool:
        """Whether the values are those of weights in that state; no step can write freed ones."""
        if state is None or self._state is None:
            return False
        return self._state == state or (self._alone and self._state[1:] == state[1:])

    def update(self, weights: Sequence[torch.Tensor], state: State | None) -> list[torch.Tensor]:
        """The values; the program runs if a weight has changed since it last did.

        Raises `DroppedWeightError` where it must and a weight's data is freed.
        """
        if self.is_of(state):
            return self.values
        if any(map(freed.is_freed, weights)):
            came = "one that was packed otherwise, as for other sizes, and freed"
            raise DroppedWeightError("a weight with data", came, freed.TODO)
        self._alone = False
        for weight in weights:
            _life(weight).parts = [part for part in _life(weight).parts if part is not self]
        self.storages, self._weights = [], []  # what happens to the old ones no longer matters
        self.drop()
        values = _settle(self.values, self.program.run(weights), self._own)
        storages = [w.untyped_storage() for w in weights]
        self.values, self._state = values, state
        self._own = [v for v in values if _storage(v) not in storages]
        self.storages = [weakref.ref(s, _calls(self, _Part.drop)) for s in storages]
        self._weights = [weakref.ref(_life(w), _calls(self, _Part.free)) for w in weights]
        return values

    def free_weights(self, weights: Sequence[torch.Tensor]) -> bool:
        """Free the weights' data, if nobody else has it; whether that was done."""
        if self._alone or len(self._own) < len(self.values):
            return False
        if why := freed.free(weights):
            decisions.log.info("plain weights are not freed: %s", why)
            return False
        facts = _state(tuple(weights))
        assert facts is not None
        self._state, self._alone = _state_of_part(facts, tuple), True
        for user in self.users:  # which know them by where they lay
            if (snapshot := user()) is not None:
                snapshot.current = None
        for weight in weights:
            _life(weight).parts.append(self)
        return True

    def forget(self) -> int:
        """As `drop`, if they can be derived anew."""
        return 0 if self._alone else self.drop()

    def drop(self) -> int:
        """Have the values derived anew at their next use; how many of them were up to date."""
        valid = len(self.values) if self._state else 0
        self._state = None
        for user in self.users:
            snapshot = user()
            if snapshot is not None:
                snapshot.current = None
        if not self.captured:
            self.values, self._own = [], []
        return valid

    def free(self) -> None:
        """Drop the values and their addresses: nobody can ask for them again."""
        self.drop()
        self.values, self._own = [], []


class _Life:
    """Carried by a weight, and dead with it.

    A weak reference to the weight itself would keep users from `torch.utils.swap_tensors`, which
    `module.to` and `load_state_dict` may use.
    """

    __slots__ = ("__weakref__", "parts")

    def __init__(self) -> None:
        self.parts: list[_Part] = []  # what was derived of a weight whose data is freed

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return OrderedDict, ()  # whoever saves a weight need not know us to load it


def _life(weight: torch.Tensor) -> _Life:
    carried = vars(weight)
    if not isinstance(carried.get("_ipex_life"), _Life):
        carried["_ipex_life"] = _Life()
    life: _Life = carried["_ipex_life"]
    return life


def _calls(part: _Part, method: Callable[[_Part], object]) -> Callable[[object], None]:
    """A callback that does not keep `part` alive."""
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
        return sum(part.forget() for part in parts)


def derived_memory() -> int:
    """See `ipex_inductor.derived_memory`."""
    with _lock:
        values = [value for part in list(_shared.values()) for value in part.values]
    storages = {s._cdata: s.nbytes() for s in map(_storage, values) if s is not None}
    return sum(storages.values()) + sum(v.nbytes for v in values if _storage(v) is None)


def _shared_part(program: Program, key: tuple[int, ...], captured: bool) -> _Part:
    """The part of the weights with these identities, which every graph of the process shares."""
    part = _shared.setdefault((program.text, key), _Part(program))
    part.captured |= captured
    return part


# torch's fused optimizers write parameters without counting a version (2.11 to 2.15), so every step
# of any optimizer in the process counts as a change.
_optimizer_steps = 0


def _count_step(*_: Any) -> None:
    global _optimizer_steps
    if not torch.compiler.is_compiling():  # a compiled step counts versions, and must not guard
        _optimizer_steps += 1


register_optimizer_step_post_hook(_count_step)


def _as_they_lie(objects: tuple[Any, ...]) -> bytes:
    """The identities of `objects`, which are what a tuple of CPython holds."""
    start = id(objects) + tuple.__basicsize__
    return ctypes.string_at(start, len(objects) * tuple.__itemsize__)


def _one_by_one(objects: tuple[Any, ...]) -> bytes:
    """The same from `id`, which takes fifteen times as long."""
    return struct.pack(f"@{len(objects)}P", *map(id, objects))


_samples = (object(), object(), object())
_identities = _as_they_lie if _as_they_lie(_samples) == _one_by_one(_samples) else _one_by_one
_version = attrgetter("_version")
_address = torch.Tensor.data_ptr  # or `freed.address`


def _state(weights: tuple[torch.Tensor, ...], reader: Reader | None = None) -> State | None:
    """Equal for two calls only if no weight changed; None if torch does not count versions."""
    if reader is not None and (told := reader.read(weights)):
        return _optimizer_steps, told
    try:
        address = freed.address if freed.any_is() else _address
        facts = (list(map(ask, weights)) for ask in (_version, address))
        return _optimizer_steps, _identities(weights), *facts
    except RuntimeError:  # inference tensors
        return None


def _state_of_part(state: State, own: Callable[[Sequence[Any]], tuple[Any, ...]]) -> State:
    """What `state` says of the weights of a part, which is found by their identities."""
    steps, *facts = state
    if len(facts) == 1:
        told = memoryview(facts[0]).cast("q").tolist()
        count = len(told) // 3
        facts = [None, told[count : 2 * count], told[2 * count :]]
    return steps, *map(own, facts[1:])


def taking(numbers: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """A function that gives the values with these numbers."""
    if len(numbers) < 2:
        return lambda values: tuple([values[number] for number in numbers])
    return itemgetter(*numbers)


def _synchronize(weights: Sequence[torch.Tensor]) -> None:
    """Wait for all streams of the devices of `weights`, unless one of them is being captured."""
    for device in {w.device for w in weights if w.device.type != "cpu"}:
        if not (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            torch.accelerator.synchronize(device)


def _storage(value: torch.Tensor) -> torch.UntypedStorage | None:
    """None for oneDNN's opaque tensors."""
    return value.untyped_storage() if value.layout == torch.strided else None


def _addresses(part: _Part) -> list[int]:
    return [storage._cdata for storage in (ref() for ref in part.storages) if storage is not None]


def _settle(
    old: list[torch.Tensor], new: list[torch.Tensor], own: list[torch.Tensor]
) -> list[torch.Tensor]:
    """The new values at the old addresses where they fit; `own` are those no weight shares."""

    def fits(a: torch.Tensor, b: torch.Tensor) -> bool:
        same = a is not b and a.device == b.device and a.dtype == b.dtype and a.shape == b.shape
        strided = a.layout == b.layout == torch.strided
        return same and strided and a.stride() == b.stride() and any(a is o for o in own)

    with torch.inference_mode(False), torch.no_grad():
        return [a.copy_(b) if fits(a, b) else b for a, b in zip(old or new, new, strict=True)]
