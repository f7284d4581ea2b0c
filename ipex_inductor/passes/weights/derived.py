"""Results of a graph's weight-only programs: when they are recomputed, and which models share them.

A weight has changed if its identity, version or address has, if an access that counts no version
wrote it (`weight_access`), or if a sample of its contents differs, drawn anew at each call. It or
its storage may have died, and identity or address passed on: both are watched. Weights are never
held. Released storage (`templates/tensor_reader/freed.py`) is the exception: the weight then holds
the results computed from it.

Computing pays for weights that stay. If they change again and again before the cost was paid back,
or another process may write them, `PlainGraph` requests the graph that reads plain weights.
"""

import contextlib
import itertools
import math
import threading
import time
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from operator import itemgetter
from typing import Any

import torch

from ipex_inductor import compat
from ipex_inductor.errors import ArgumentError
from ipex_inductor.passes.weights import weight_access, weight_snapshot
from ipex_inductor.passes.weights.program import Program
from ipex_inductor.passes.weights.weight_access import open_storage
from ipex_inductor.passes.weights.weight_contents import (
    SWEEP,
    AnyHashes,
    are_worth_watching,
    find_differing,
    gather_contents,
    gather_on_devices,
    is_compared_slowly,
)
from ipex_inductor.passes.weights.weight_doubts import FULL, lasting_doubts, note_holders
from ipex_inductor.passes.weights.weight_reader import any_reader
from ipex_inductor.passes.weights.weight_results import (
    Part,
    addresses_of,
    all_parts,
    shared_part,
    state_of_part,
    storage_of,
)
from ipex_inductor.passes.weights.weight_snapshot import Check, Current, Snapshot
from ipex_inductor.reporting import decisions
from ipex_inductor.runtime.huge_pages import available_memory, begin_mapping, trim_heap
from ipex_inductor.runtime.untouched_weights import are_untouched
from ipex_inductor.templates.tensor_reader import freed
from ipex_inductor.templates.tensor_reader.weights_cpp import FACTS, SAME, Changed
from ipex_inductor.templates.tensor_reader.write_watch import UnwatchableError

MOST_CALLS = 1000  # the most calls for which weights must stay before results are recomputed

_lock = threading.RLock()  # around all computing; callbacks of weak references never take it
_made: ContextVar["list[DerivedWeights] | None"] = ContextVar("derived weights made", default=None)


@contextlib.contextmanager
def collecting() -> Iterator["list[DerivedWeights]"]:
    """Collect the `DerivedWeights` that are created inside, as for a graph compiled there."""
    collected: list[DerivedWeights] = []
    token = _made.set(collected)
    try:
        yield collected
    finally:
        _made.reset(token)


class DerivedWeights:
    """The results of one graph's programs, for each of the models that share the graph.

    Graphs that run equal programs on the same weights share the results.

    Args:
        programs: The weight-only programs of the graph.
        captured: Whether CUDA graphs read the results, so that new ones are written to the old
            addresses.
    """

    def __init__(self, programs: Sequence[Program], captured: bool) -> None:
        self._numbers = numbers = sorted({i for program in programs for i in program.inputs})
        self._ends = (numbers[0], numbers[-1]) if numbers else ()
        self._weights = make_getter(numbers)
        self._programs = [(p, make_getter([numbers.index(i) for i in p.inputs])) for p in programs]
        all_known = all(program.is_known for program in programs)
        self._unanalysed = compat.skip_op_analysis if all_known else contextlib.nullcontext
        self._captured = captured
        self._changed: Changed = _never_read  # replaced when the first results are computed
        self._snapshots: OrderedDict[tuple[int, ...], Snapshot] = OrderedDict()
        self._by_ends: dict[tuple[int, ...], Snapshot] = {}
        self._seconds = 0.0  # the time that computing all results took
        self._call_seconds = math.inf  # the least time that a call of the graph took
        self.computed_now = (
            False  # whether this call computed results, so that the caller times the graph
        )
        self.has_plain_graph = False  # whether the caller understands `PlainGraph`
        self.left: list[Part] = []  # of a model with a dead weight, until the next is computed
        collected = _made.get()
        if collected is not None:
            collected.append(self)

    def of(self, inputs: list[Any], checks: list[Check] | None = None) -> list[torch.Tensor]:
        """Return the results for these graph inputs, in the order of the programs.

        Args:
            inputs: All inputs of the graph.
            checks: Gets the comparisons that GPUs have begun; without it they are waited for. The
                caller calls `are_confirmed` after its graph.

        Raises:
            PlainGraph: If the caller supports it, and computing results does not pay or is not
                safe.
        """
        waits, checks = checks is None, [] if checks is None else checks
        snapshot = self._by_ends.get(tuple([id(inputs[n]) for n in self._ends]))
        if snapshot is not None and weight_access.is_quiet():
            values = self._current_values(snapshot, inputs, checks)
            if values is not None and (not waits or self.are_confirmed(inputs, checks)):
                return values
        while True:
            checks.clear()  # they belong to outdated results
            with _lock, self._unanalysed():
                values = self._settle(inputs, checks)
            if not waits or self.are_confirmed(inputs, checks):  # without the lock, as it may wait
                return values

    def are_confirmed(self, inputs: list[Any], checks: list[Check]) -> bool:
        """Return whether the weights equal what the results were computed from; outdate others.

        Args:
            inputs: All inputs of the graph.
            checks: The comparisons that the call of `of` returned.
        """
        return all(
            self._is_rewritten(check.snapshot, check.current, inputs, number)
            for check in checks
            for number in find_differing(check.launched)
        )

    def note_call(self, seconds: float) -> None:
        """Note how long the graph took in a call in which results were computed."""
        self._call_seconds = min(self._call_seconds, seconds)
        self.computed_now = False

    def _current_values(
        self, snapshot: Snapshot, inputs: list[Any], checks: list[Check]
    ) -> list[torch.Tensor] | None:
        """Count the call and return the results; None if they must be computed.

        On None nothing here holds old contents, whose pages would otherwise stay as they were
        written.
        """
        current = snapshot.current  # read once: another thread may replace it
        if current is None or not self._is_current(snapshot, current, inputs, checks):
            return None
        snapshot.calls += 1
        if snapshot.calls % SWEEP == 0 and is_compared_slowly(current.contents):
            self._watch(snapshot, current, inputs)
            return current.values if snapshot.current is not None else None
        return current.values

    def _is_current(
        self,
        snapshot: Snapshot,
        current: Current,
        inputs: list[Any],
        checks: list[Check],
    ) -> bool:
        """Compare facts and contents; outdate results whose weights differ.

        Args:
            snapshot: The results for one model.
            current: What `snapshot.current` was when the call began.
            inputs: All inputs of the graph.
            checks: Gets the comparison that GPUs begin.

        Returns:
            Whether the results are up to date, as far as the CPU can tell.
        """
        asks = current.contents.asks if current.contents is not None else 0
        for _ in range(max(asks, 1)):  # each skips a weight that was rewritten with equal contents
            number = self._changed(inputs, current.read, current.contents)
            on_devices = current.on_devices
            is_compared = on_devices is not None and are_untouched() and on_devices.is_answered()
            if number == SAME and on_devices is not None and not is_compared:
                checks.append(Check(snapshot, current, on_devices.launch()))
            if number in (SAME, FACTS):
                return number == SAME
            if not self._is_rewritten(snapshot, current, inputs, number):
                return False
        return True

    def _is_rewritten(
        self, snapshot: Snapshot, current: Current, inputs: list[Any], number: int
    ) -> bool:
        """Return whether a weight holds its former contents; outdate its results if not.

        Args:
            snapshot: The results for one model.
            current: What `snapshot.current` was when the call began.
            inputs: All inputs of the graph.
            number: The number of the weight, among the weights of the graph.
        """
        weight = inputs[self._numbers[number]]
        with _lock:
            try:
                if current.contents is not None:
                    current.contents.protect(number)
                weight_access.outdate_if_written(any_reader().storage_of(weight))
            except UnwatchableError:  # other memory was mapped there
                weight_access.outdate(any_reader().storage_of(weight))
            if snapshot.current is current:  # written with equal contents
                if current.on_devices is not None:
                    current.on_devices.forget()
                return True
            _warn_unseen(weight)
            for part in snapshot.parts:  # other weights may have been written too
                if not part.is_current():
                    part.outdate_storages()
        return False

    def _watch(self, snapshot: Snapshot, current: Current, inputs: list[Any]) -> None:
        """Have the kernel note writes to weights that stayed for `SWEEP` calls."""
        weights = self._weights(inputs)
        with _lock:
            for part, (_, select) in zip(snapshot.parts, self._programs, strict=True):
                if not part.watch_writes():
                    continue
                number = part.find_outdated()
                if number is not None:
                    _warn_unseen(select(weights)[number])
                    part.outdate_storages()
            hashes = self._hashes(snapshot.parts, len(weights))
            contents = gather_contents(hashes, weights)
            if snapshot.current is not current or contents is None or current.contents is None:
                return
            # Otherwise the present comparison goes on.
            if contents.unwatched_bytes < current.contents.unwatched_bytes:
                snapshot.current = replace(current, contents=contents)

    def _settle(self, inputs: list[Any], checks: list[Check]) -> list[torch.Tensor]:
        if self._changed is _never_read:
            self._changed = any_reader().make_comparer(self._numbers)
        weights = self._weights(inputs)
        snapshot = self._snapshots.get(tuple(map(id, weights)))
        in_doubt = weight_access.settle(snapshot.storages if snapshot else None)
        if snapshot is None:
            return self._compute(weights, self._begin(weights))
        self._by_ends[tuple([id(inputs[n]) for n in self._ends])] = snapshot
        self._snapshots.move_to_end(snapshot.key)
        if in_doubt and self.has_plain_graph:
            doubtful = [w for w in weights if any_reader().storage_of(w) in in_doubt]
            if sum(w.nbytes for w in doubtful) > FULL:
                reason = "their memory was handed out, and may be written at any time"
                raise snapshot.give_up(weights, MOST_CALLS, reason)
        values = self._current_values(snapshot, inputs, checks)
        if values is None:
            checks.clear()
            return self._compute(weights, snapshot)
        return values

    def _begin(self, weights: tuple[torch.Tensor, ...]) -> Snapshot:
        """Return an empty snapshot for a model that is new to the graph."""
        self._make_room()
        snapshot = Snapshot(self, tuple(map(id, weights)))
        self._snapshots[snapshot.key] = snapshot
        if self._ends:
            self._by_ends[snapshot.ends] = snapshot
        return snapshot

    def _make_room(self) -> None:
        """Drop the least recently used models while memory is scarce."""
        while self._snapshots:
            oldest = next(iter(self._snapshots.values()))
            if available_memory(oldest.device) > 2 * oldest.size:
                return
            self.drop(oldest)

    def drop(self, snapshot: Snapshot) -> None:
        """Drop the results for one model; results that only this graph uses are freed."""
        self._snapshots.pop(snapshot.key, None)
        if self._by_ends.get(snapshot.ends) is snapshot:
            self._by_ends.pop(snapshot.ends, None)

    def _compute(self, weights: tuple[torch.Tensor, ...], snapshot: Snapshot) -> list[torch.Tensor]:
        weight_access.settle()  # all storages, as other graphs may have computed from them
        doubts = lasting_doubts(weights)
        storages = [open_storage(w) for w in weights]  # held, so that no address is reused
        read = any_reader().read(weights)
        if self.has_plain_graph and sum(doubt.size for doubt in doubts) > FULL:
            raise snapshot.give_up(weights, MOST_CALLS, doubts[0].reason)
        parts = [
            shared_part(program, select(snapshot.key), self._captured)
            for program, select in self._programs
        ]
        states = [state_of_part(read, select) for _, select in self._programs]
        outdated = [n for n, part in enumerate(parts) if not part.is_of(states[n])]
        watched = snapshot.is_new or snapshot.calls >= SWEEP
        watched &= are_worth_watching(weights)
        if outdated:
            self._refuse_unstable(weights, snapshot)
        began = time.perf_counter()
        # First the comparison is set up: a write during the computation shows at the next call.
        for n in outdated:
            parts[n].observe(self._programs[n][1](weights), states[n], watched)
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
        now = any_reader().read(weights)
        if read and now == (read := self._with_freed(weights, read, now)):
            hashes = self._hashes(parts, len(weights))
            contents, on_devices = gather_contents(hashes, weights), gather_on_devices(hashes)
            snapshot.current = Current(read, contents, on_devices, values)
        else:  # no plain storage, or another thread wrote meanwhile
            for part in parts:
                part.outdate()
        if outdated and snapshot.is_new:
            trim_heap()  # temporaries, and released storage of weights
        snapshot.is_new = False
        del storages
        return values

    def _run(
        self,
        weights: tuple[torch.Tensor, ...],
        parts: "Sequence[Part]",
    ) -> list[torch.Tensor]:
        values: list[torch.Tensor] = []
        _synchronize(weights)  # a stream may still read values that are overwritten now
        begin_mapping()
        readers = Counter(a for part in all_parts() for a in {*addresses_of(part)})
        for part, (program, select) in zip(parts, self._programs, strict=True):
            own = select(weights)
            before = any_reader().read(own) if program.drops else b""
            values += part.update(own)
            if before and before == any_reader().read(own):
                self._free_weights(part, own, readers)
        _synchronize(weights)  # another stream may read it next
        return values

    def _refuse_unstable(self, weights: tuple[torch.Tensor, ...], snapshot: Snapshot) -> None:
        """Raise `PlainGraph` if the weights changed too often before computing was paid back."""
        if snapshot.is_new or snapshot.resumes:
            snapshot.resumes = False
            return
        calls = min(MOST_CALLS, math.ceil(self._seconds / self._call_seconds) or 1)
        snapshot.unpaid = snapshot.unpaid + 1 if snapshot.calls < calls else 0
        snapshot.calls = 0
        if self.has_plain_graph and snapshot.unpaid >= weight_snapshot.UNPAID:
            times = weight_snapshot.UNPAID
            reason = f"they changed {times} times within fewer calls than computing pays for"
            raise snapshot.give_up(weights, calls, reason)

    def _hashes(self, parts: "Sequence[Part]", count: int) -> list[AnyHashes]:
        """Return the contents that the results were computed from, in the order of the weights."""
        result: list[AnyHashes] = [None] * count
        for part, (_, select) in zip(parts, self._programs, strict=True):
            for number, hashes in zip(select(range(count)), part.hashes, strict=True):
                result[number] = result[number] or hashes
        return result

    @staticmethod
    def _free_weights(
        part: "Part", weights: tuple[torch.Tensor, ...], readers: Mapping[int, int]
    ) -> None:
        """Release the storage of a part's weights if no other results are computed from them.

        It happens before the next part is computed, so memory holds one part's weights twice.

        Args:
            part: The results.
            weights: The weights of the part.
            readers: The number of parts that read each storage, by its address.
        """
        if all(readers[a] == 1 for a in addresses_of(part)):
            part.free_weights(weights)
        else:
            decisions.log.info("plain weights are not freed: another graph derives from them")

    @staticmethod
    def _with_freed(weights: tuple[torch.Tensor, ...], read: bytes, now: bytes) -> bytes:
        """Return the facts that were read first, and the present ones of freed weights.

        Args:
            weights: The weights of the graph.
            read: Identities, versions and addresses of all weights, before results were computed.
            now: The same facts, behind it.
        """
        if not freed.any_is() or len(read) != len(now):
            return read
        before, after = (memoryview(facts).cast("q").tolist() for facts in (read, now))
        for n, weight in enumerate(weights):
            if freed.is_freed(weight):
                for block in (len(weights), 2 * len(weights)):
                    before[block + n] = after[block + n]
        return array("q", before).tobytes()


def refresh(model: torch.nn.Module | None) -> int:
    """Recompute results at their next use: see `ipex_inductor.refresh`."""
    if not isinstance(model, torch.nn.Module | None):
        raise ArgumentError(
            "a module, a compiled module, or None for all weights",
            f"a {type(model).__name__}",
            "Pass the model whose weights were written.",
        )
    with _lock:
        parts = all_parts()
        if model is not None:
            tensors = itertools.chain(model.parameters(), model.buffers())
            written = {s._cdata for s in map(storage_of, tensors) if s is not None}
            parts = [part for part in parts if not written.isdisjoint(addresses_of(part))]
        return sum(part.outdate() for part in parts)


def derived_memory() -> int:
    """Return the bytes of all results: see `ipex_inductor.derived_memory`."""
    with _lock:
        values = [value for part in all_parts() for value in part.values]
    storages = {s._cdata: s.nbytes() for s in map(storage_of, values) if s is not None}
    return sum(storages.values()) + sum(v.nbytes for v in values if storage_of(v) is None)


def make_getter(numbers: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Return a function that returns the values with these numbers."""
    if len(numbers) < 2:
        return lambda values: tuple([values[number] for number in numbers])
    return itemgetter(*numbers)


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
