"""Whether a graph's calls are launched kernel by kernel or replayed: measured in a call of its own.

The first calls run as they are, as kernels are still chosen in them. Then one is timed; if the host
is what takes the time, it is captured, timed again, and kept only if that is faster. A graph
without effects is timed within one call, which runs it several times. A graph that writes its
inputs is timed in the calls that come anyway, each of which runs it once.
"""

import contextlib
import threading
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterator, Sequence
from contextvars import ContextVar
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ipex_inductor import compat
from ipex_inductor.capture import cuda
from ipex_inductor.capture.reasons import why_not_results
from ipex_inductor.reporting.decisions import GraphReport

NAME = "graph capture"

WARM_UP = 2  # calls
ROUNDS = 5  # of timing; the least counts, as everything else in the process only adds
HOST_BOUND = 0.4  # the part of a call until it returns, from which on it is captured to see
GAIN = 0.97  # of the time of a call that a replay may take, its copies counted
MOVED = 8  # calls in a row with weights elsewhere, after which those addresses are captured
COPIED = 256 << 20  # bytes of inputs and results, of which a graph keeps a copy, at most
CAPTURES = 4  # of a graph that were replayed less than PAID times: weights may move so often
PAID = (
    64  # replays that are worth a capture and its timing: some 20 calls, and 10 ms to instantiate
)

Call = Callable[[list[Any]], Any]
Replay = Callable[[tuple[Any, ...]], tuple[Any, ...]]


class Made(NamedTuple):
    """A call that was timed."""

    results: Sequence[Any]
    time: cuda.Time
    inputs: Sequence[Any]


class Captured(NamedTuple):
    """A graph, what it was captured under, and the `addresses` that it writes."""

    replay: Replay
    where: list[Any]
    written: list[int]


# Yields how the next call is to be made and is sent that call; returns what is to be said.
Trial = Generator[Call, Made, str]

_at_once: ContextVar[bool] = ContextVar("ipex_capture_at_once", default=False)


@contextlib.contextmanager
def at_once() -> Iterator[None]:
    """Graphs that are called inside decide in their first call, which runs them several times."""
    token = _at_once.set(True)
    try:
        yield
    finally:
        _at_once.reset(token)


class Calls:
    """The calls of one graph in this process.

    `call` is Inductor's code, `static` the numbers of the inputs that stay where they are: weights,
    what was derived from them, and inputs that the graph writes; `written` those of the latter, and
    `moving` those of all others that it reads. A graph has no effect but its results and what it
    writes. What is decided goes into `report`.
    """

    def __init__(
        self,
        call: Call,
        static: Sequence[int],
        moving: Sequence[int],
        report: GraphReport | None,
        written: Sequence[int] = (),
    ) -> None:
        self._call, self._report = call, report
        self._static, self._moving, self._numbers = _taking(static), _taking(moving), moving
        self._written = _taking(written) if written else None
        self._device: cuda.Device | None = None
        self._lock = threading.Lock()
        self._waits = WARM_UP  # calls before one is timed
        self._settled = False  # nothing is captured from now on
        self._unpaid = 0  # captures that were replayed too seldom
        self._replays = 0  # of the latest capture
        self._graph: Captured | None = None
        self._trial: tuple[Trial, Call] | None = None  # under way, and how its next call is made
        self._tested: Captured | None = None  # what a trial under way captured

    def __call__(self, inputs: list[Any]) -> Any:
        """Boxed: `inputs` is emptied."""
        graph = self._graph
        if graph is not None:
            return self._replayed(graph, inputs)
        if self._settled or not self._is_due(inputs):
            return self._call(inputs)
        if not self._lock.acquire(blocking=False):  # another thread is at it
            return self._call(inputs)
        try:
            return self._decide(inputs)
        finally:
            self._lock.release()

    def _is_due(self, inputs: list[Any]) -> bool:
        """Whether this call is one to be timed."""
        if any(isinstance(value, FakeTensor) for value in inputs):
            return False  # of a device that is not here
        if self._device is None:
            self._device = cuda.Device(inputs[0].device.index or 0)
        if _at_once.get():
            return True
        self._waits -= 1
        return self._waits < 0 and self._device.is_free()

    def _replayed(self, graph: Captured, inputs: list[Any]) -> Any:
        assert self._device is not None
        if not self._device.is_free():
            return self._call(inputs)
        if _circumstances(self._static(inputs)) != graph.where:
            return self._moved(inputs)
        self._waits = MOVED
        self._replays += 1
        moving = self._moving(inputs)
        if graph.written and any(lies_in(value, graph.written) for value in moving):
            return self._call(inputs)
        inputs.clear()
        with self._lock:
            return graph.replay(moving)

    def _moved(self, inputs: list[Any]) -> Any:
        """Weights lie elsewhere, say: another model's turn, or theirs from now on."""
        self._waits -= 1
        if self._waits <= 0 and self._lock.acquire(blocking=False):
            try:
                self._drop()
                if not self._settled:
                    return self._decide(inputs)
                self._say(f"not captured again: weights moved {CAPTURES} times")
            finally:
                self._lock.release()
        return self._call(inputs)

    def _drop(self) -> None:
        assert self._device is not None
        self._device.settle()
        self._graph = None
        self._unpaid += self._replays < PAID
        self._waits, self._settled = -1, self._unpaid >= CAPTURES

    def _decide(self, inputs: list[Any]) -> Any:
        """The results of this call; how all others are made is settled on the way."""
        assert self._device is not None
        if self._written is not None:
            return self._tried(self._device, inputs)
        with compat.unanalysed() if _at_once.get() else contextlib.nullcontext():
            if _at_once.get():
                for _ in range(WARM_UP):
                    self._call([*inputs])
            if self._settled or self._graph is not None or not self._device.is_free():
                return self._call(inputs)
            return self._timed_at_once(self._device, inputs)

    def _timed_at_once(self, device: cuda.Device, inputs: list[Any]) -> Any:
        """The results of the first of the calls that a trial makes, all of them on `inputs`."""
        self._settled = True
        trial = self._begin(device)
        first = made = self._timed(device, next(trial), inputs)
        with self._concluding():
            try:
                while True:
                    made = _made(device, trial.send(made), inputs)
            except StopIteration as end:
                self._say(end.value)
        inputs.clear()
        return first.results

    def _tried(self, device: cuda.Device, inputs: list[Any]) -> Any:
        """The results of this call, by which a trial goes one call further."""
        if _at_once.get():
            self._say("not decided in one call: it writes its inputs, so its next calls are timed")
            return self._call(inputs)
        if self._settled or self._graph is not None or not device.is_free():
            return self._call(inputs)
        assert self._written is not None
        written = addresses(self._written(inputs))
        if any(lies_in(value, written) for value in self._moving(inputs)):
            return self._call(inputs)  # a copy of it would not see what is written
        if self._tested and self._tested.where != _circumstances(self._static(inputs)):
            self._trial, self._tested = None, None  # it reads and writes elsewhere
            self._unpaid += 1
            if self._unpaid >= CAPTURES:
                self._settled = True
                self._say("not captured: what it writes moved while it was timed")
                return self._call(inputs)
        if self._trial is None:
            trial = self._begin(device)
            self._trial = trial, next(trial)
        trial, call = self._trial
        given = [*inputs]
        inputs.clear()
        made = self._timed(device, call, given)
        with self._concluding():
            try:
                self._trial = trial, trial.send(made)
            except StopIteration as end:
                self._trial, self._tested, self._settled = None, None, True
                self._say(end.value)
        return made.results

    def _timed(self, device: cuda.Device, call: Call, inputs: Sequence[Any]) -> Made:
        """A call whose results are the user's."""
        try:
            return _made(device, call, inputs)
        except BaseException:
            self._trial, self._tested, self._settled = None, None, True
            self._say("not captured: the call that was to be timed failed")
            raise

    @contextlib.contextmanager
    def _concluding(self) -> Iterator[None]:
        """What fails inside costs the capture and no call: its results are there."""
        try:
            yield
        except BaseException as error:
            self._graph, self._trial, self._tested, self._settled = None, None, None, True
            if not isinstance(error, Exception):
                self._say("not captured: it was interrupted")
                raise
            self._say(f"not captured: {_words(error)}")

    def _begin(self, device: cuda.Device) -> Trial:
        """A trial, which keeps the graph if it gains; between calls it holds none of their tensors.

        Each call that it asks for is made once.
        """
        made = yield self._call
        plain = made.time
        if reason := self._why_not(made):
            return f"not captured: {reason}"
        for _ in range(ROUNDS):
            if plain.host < HOST_BOUND * plain.total:
                return (
                    f"not captured: {_ms(plain.host)} to launch what takes {_ms(plain.total)}, "
                    "so the host does not hold up the device"
                )
            del made
            made = yield self._call
            plain = _least(plain, made.time)
        tested = self._tested = self._captured(device, made.inputs)
        del made

        def replay(given: list[Any]) -> Any:
            return tested.replay(self._moving(given))

        yield replay  # the first uploads it
        replayed = cuda.Time(float("inf"), float("inf"))
        for _ in range(ROUNDS):
            replayed = _least(replayed, (yield replay).time)
            plain = _least(plain, (yield self._call).time)
        times = f"{_ms(replayed.total)} in a CUDA graph, {_ms(plain.total)} kernel by kernel"
        if replayed.total > GAIN * plain.total:
            return f"not captured: a call takes {times}"
        self._waits, self._replays = MOVED, 0
        self._graph = tested
        return f"captured: a call takes {times}"

    def _captured(self, device: cuda.Device, inputs: Sequence[Any]) -> Captured:
        replay = device.capture(self._call, inputs, self._numbers)
        written = addresses(self._written(inputs)) if self._written else []
        return Captured(replay, _circumstances(self._static(inputs)), written)

    def _why_not(self, made: Made) -> str:
        """As one call tells."""
        if reason := why_not_results(made.results, made.inputs):
            return reason
        values = [*made.results, *self._moving(made.inputs)]
        size = sum(value.nbytes for value in values if isinstance(value, torch.Tensor))
        if size > COPIED:
            return f"inputs and results of {size >> 20} MiB would be kept once more"
        return ""

    def _say(self, reason: str) -> None:
        if self._report is not None:
            self._report.add("choice", NAME, reason)


def _made(device: cuda.Device, call: Call, inputs: Sequence[Any]) -> Made:
    return Made(*device.timed(lambda: call([*inputs])), inputs)


def _least(a: cuda.Time, b: cuda.Time) -> cuda.Time:
    return cuda.Time(min(a.host, b.host), min(a.total, b.total))


def _circumstances(weights: Sequence[torch.Tensor]) -> list[Any]:
    """What a replay does not see: where weights are, and what cuDNN is told."""
    return [*compat.cudnn_settings(), *map(torch.Tensor.data_ptr, weights)]


def addresses(values: Sequence[torch.Tensor]) -> list[int]:
    """Where memory of these tensors begins and ends, in turns, in order."""
    found: list[int] = []
    for begin, end in sorted(map(_span, values)):
        if found and begin <= found[-1]:
            found[-1] = max(found[-1], end)
        else:
            found += begin, end
    return found


def lies_in(value: torch.Tensor, found: list[int]) -> bool:
    """Whether a tensor may have memory between any of these `addresses`."""
    begin, end = _span(value)
    before = bisect_right(found, begin)
    return before % 2 == 1 or (before < len(found) and found[before] < end)


def _span(value: torch.Tensor) -> tuple[int, int]:
    begin, sizes = value.data_ptr(), zip(value.shape, value.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in sizes) if value.numel() else -1
    return begin, begin + (last + 1) * value.itemsize


def _taking(numbers: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """A function that gives the values with these numbers."""
    if len(numbers) < 2:
        return lambda values: tuple(values[i] for i in numbers)
    return itemgetter(*numbers)


def _words(error: BaseException) -> str:
    """What went wrong; that the capture could not be ended after it says less."""
    first = error.__context__ or error
    return f"{type(first).__name__}: {str(first).strip()[:300]}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
