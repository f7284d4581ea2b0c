"""Decide by measuring whether a graph is launched kernel by kernel or replayed as a CUDA graph.

The first calls run uncaptured, as kernels are still chosen in them. Then a call is timed. If it is
host-bound, it is captured and timed again, and the capture is used only if it is faster. A graph
without effects is timed within one call, which runs it several times. A graph that writes its
inputs is timed in the user's calls, each of which runs it once.
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
ROUNDS = 5  # of timing; the minimum counts, as all disturbances only add
HOST_BOUND = 0.4  # least share of a call until it returns for a capture to be tried
GAIN = 0.97  # most time of a replay, with its copies, relative to a call
MOVED = 8  # consecutive calls with moved weights before the new addresses are captured
COPIED = 256 << 20  # most bytes of inputs and results, of which a graph keeps a copy
CAPTURES = 4  # most captures of a graph that were replayed fewer than PAID times
# Replays that pay for a capture and its timing: some 20 calls, and 10 ms to instantiate.
PAID = 64

Call = Callable[[list[Any]], Any]
Replay = Callable[[tuple[Any, ...]], tuple[Any, ...]]


class TimedCall(NamedTuple):
    """A call that was timed."""

    results: Sequence[Any]
    time: cuda.Time
    inputs: Sequence[Any]


class Captured(NamedTuple):
    """A CUDA graph, the state it was captured under, and the `addresses` that it writes."""

    replay: Replay
    where: list[Any]
    written: list[int]


# Yields the callable of the next call, is sent that timed call, and returns the reported outcome.
Trial = Generator[Call, TimedCall, str]

_at_once: ContextVar[bool] = ContextVar("ipex_capture_at_once", default=False)


@contextlib.contextmanager
def at_once() -> Iterator[None]:
    """Let graphs called inside decide in their first call, which runs them several times."""
    token = _at_once.set(True)
    try:
        yield
    finally:
        _at_once.reset(token)


class Calls:
    """The calls of one graph in this process.

    A graph has no effect but its results and the inputs that it writes.

    Args:
        call: Inductor's code.
        static: indices of inputs that stay at their addresses: weights, tensors derived from them,
            and inputs that the graph writes.
        moving: indices of all other inputs that the graph reads.
        report: receives the decisions.
        written: indices of inputs that the graph writes.
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
        self._static, self._moving, self._numbers = _picker(static), _picker(moving), moving
        self._written = _picker(written) if written else None
        self._device: cuda.Device | None = None
        self._lock = threading.Lock()
        self._waits = WARM_UP  # calls left before one is timed
        self._settled = False  # nothing is captured from now on
        self._unpaid = 0  # captures with too few replays
        self._replays = 0  # of the latest capture
        self._graph: Captured | None = None
        # Current trial, and the callable of its next call.
        self._trial: tuple[Trial, Call] | None = None
        self._tested: Captured | None = None  # capture of the current trial

    def __call__(self, inputs: list[Any]) -> Any:
        """Run or replay the graph on boxed `inputs`, which are emptied."""
        graph = self._graph
        if graph is not None:
            return self._replay_graph(graph, inputs)
        if self._settled or not self._is_due(inputs):
            return self._call(inputs)
        if not self._lock.acquire(blocking=False):  # another thread is deciding
            return self._call(inputs)
        try:
            return self._decide(inputs)
        finally:
            self._lock.release()

    def _is_due(self, inputs: list[Any]) -> bool:
        """Return True if this call is to be timed."""
        if any(isinstance(value, FakeTensor) for value in inputs):
            return False  # its device is not present
        if self._device is None:
            self._device = cuda.Device(inputs[0].device.index or 0)
        if _at_once.get():
            return True
        self._waits -= 1
        return self._waits < 0 and self._device.is_free()

    def _replay_graph(self, graph: Captured, inputs: list[Any]) -> Any:
        assert self._device is not None
        if not self._device.is_free():
            return self._call(inputs)
        if _capture_state(self._static(inputs)) != graph.where:
            return self._call_moved(inputs)
        self._waits = MOVED
        self._replays += 1
        moving = self._moving(inputs)
        if graph.written and any(lies_in(value, graph.written) for value in moving):
            return self._call(inputs)
        inputs.clear()
        with self._lock:
            return graph.replay(moving)

    def _call_moved(self, inputs: list[Any]) -> Any:
        """Run the graph with moved weights, and capture it again if the new addresses persist."""
        self._waits -= 1
        if self._waits <= 0 and self._lock.acquire(blocking=False):
            try:
                self._drop()
                if not self._settled:
                    return self._decide(inputs)
                self._report_choice(f"not captured again: weights moved {CAPTURES} times")
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
        """Return the results of this call, and advance the decision about all later ones."""
        assert self._device is not None
        if self._written is not None:
            return self._try_next(self._device, inputs)
        with compat.skip_op_analysis() if _at_once.get() else contextlib.nullcontext():
            if _at_once.get():
                for _ in range(WARM_UP):
                    self._call([*inputs])
            if self._settled or self._graph is not None or not self._device.is_free():
                return self._call(inputs)
            return self._timed_at_once(self._device, inputs)

    def _timed_at_once(self, device: cuda.Device, inputs: list[Any]) -> Any:
        """Return the results of the first call of a trial; all its calls use these `inputs`."""
        self._settled = True
        trial = self._begin(device)
        first = timed = self._time_user_call(device, next(trial), inputs)
        with self._concluding():
            try:
                while True:
                    timed = _time_call(device, trial.send(timed), inputs)
            except StopIteration as end:
                self._report_choice(end.value)
        inputs.clear()
        return first.results

    def _try_next(self, device: cuda.Device, inputs: list[Any]) -> Any:
        """Return the results of this call, which advances a trial by one call."""
        if _at_once.get():
            self._report_choice(
                "not decided in one call: it writes its inputs, so its next calls are timed"
            )
            return self._call(inputs)
        if self._settled or self._graph is not None or not device.is_free():
            return self._call(inputs)
        assert self._written is not None
        written = addresses(self._written(inputs))
        if any(lies_in(value, written) for value in self._moving(inputs)):
            return self._call(inputs)  # a copied input would miss what the graph writes
        if self._tested and self._tested.where != _capture_state(self._static(inputs)):
            # The tensors that it reads and writes have moved.
            self._trial, self._tested = None, None
            self._unpaid += 1
            if self._unpaid >= CAPTURES:
                self._settled = True
                self._report_choice("not captured: what it writes moved while it was timed")
                return self._call(inputs)
        if self._trial is None:
            trial = self._begin(device)
            self._trial = trial, next(trial)
        trial, call = self._trial
        call_inputs = [*inputs]
        inputs.clear()
        timed = self._time_user_call(device, call, call_inputs)
        with self._concluding():
            try:
                self._trial = trial, trial.send(timed)
            except StopIteration as end:
                self._trial, self._tested, self._settled = None, None, True
                self._report_choice(end.value)
        return timed.results

    def _time_user_call(self, device: cuda.Device, call: Call, inputs: Sequence[Any]) -> TimedCall:
        """Time a call whose results the user gets; end the trial if it fails."""
        try:
            return _time_call(device, call, inputs)
        except BaseException:
            self._trial, self._tested, self._settled = None, None, True
            self._report_choice("not captured: the call that was to be timed failed")
            raise

    @contextlib.contextmanager
    def _concluding(self) -> Iterator[None]:
        """End the trial with a report if the block fails: the results of the call exist already."""
        try:
            yield
        except BaseException as error:
            self._graph, self._trial, self._tested, self._settled = None, None, None, True
            if not isinstance(error, Exception):
                self._report_choice("not captured: it was interrupted")
                raise
            self._report_choice(f"not captured: {_error_text(error)}")

    def _begin(self, device: cuda.Device) -> Trial:
        """Yield the calls of a trial; use the capture if it gains, and return the outcome.

        Each yielded call is made once. Between calls the trial holds none of their tensors.
        """
        timed = yield self._call
        plain = timed.time
        if reason := self._why_not(timed):
            return f"not captured: {reason}"
        for _ in range(ROUNDS):
            if plain.host < HOST_BOUND * plain.total:
                return (
                    f"not captured: {_ms(plain.host)} to launch what takes {_ms(plain.total)}, "
                    "so the host does not hold up the device"
                )
            del timed
            timed = yield self._call
            plain = _fastest(plain, timed.time)
        tested = self._tested = self._capture_call(device, timed.inputs)
        del timed

        def replay(inputs: list[Any]) -> Any:
            return tested.replay(self._moving(inputs))

        yield replay  # the first replay uploads the graph
        replayed = cuda.Time(float("inf"), float("inf"))
        for _ in range(ROUNDS):
            replayed = _fastest(replayed, (yield replay).time)
            plain = _fastest(plain, (yield self._call).time)
        times = f"{_ms(replayed.total)} in a CUDA graph, {_ms(plain.total)} kernel by kernel"
        if replayed.total > GAIN * plain.total:
            return f"not captured: a call takes {times}"
        self._waits, self._replays = MOVED, 0
        self._graph = tested
        return f"captured: a call takes {times}"

    def _capture_call(self, device: cuda.Device, inputs: Sequence[Any]) -> Captured:
        """Capture the call on these inputs, with the addresses that it depends on and writes."""
        replay = device.capture(self._call, inputs, self._numbers)
        written = addresses(self._written(inputs)) if self._written else []
        return Captured(replay, _capture_state(self._static(inputs)), written)

    def _why_not(self, timed: TimedCall) -> str:
        """Return why the results or sizes of a call rule out a capture, "" if they do not."""
        if reason := why_not_results(timed.results, timed.inputs):
            return reason
        values = [*timed.results, *self._moving(timed.inputs)]
        size = sum(value.nbytes for value in values if isinstance(value, torch.Tensor))
        if size > COPIED:
            return f"inputs and results of {size >> 20} MiB would be held a second time"
        return ""

    def _report_choice(self, reason: str) -> None:
        if self._report is not None:
            self._report.add("choice", NAME, reason)


def _time_call(device: cuda.Device, call: Call, inputs: Sequence[Any]) -> TimedCall:
    return TimedCall(*device.time_call(lambda: call([*inputs])), inputs)


def _fastest(a: cuda.Time, b: cuda.Time) -> cuda.Time:
    return cuda.Time(min(a.host, b.host), min(a.total, b.total))


def _capture_state(weights: Sequence[torch.Tensor]) -> list[Any]:
    """Return the state that a replay cannot adapt to: cuDNN settings and weight addresses."""
    return [*compat.cudnn_settings(), *map(torch.Tensor.data_ptr, weights)]


def addresses(values: Sequence[torch.Tensor]) -> list[int]:
    """Return the merged address ranges of these tensors as a sorted list of begins and ends."""
    bounds: list[int] = []
    for begin, end in sorted(map(_span, values)):
        if bounds and begin <= bounds[-1]:
            bounds[-1] = max(bounds[-1], end)
        else:
            bounds += begin, end
    return bounds


def lies_in(value: torch.Tensor, bounds: list[int]) -> bool:
    """Return True if a tensor may have memory in one of these `addresses`."""
    begin, end = _span(value)
    before = bisect_right(bounds, begin)
    return before % 2 == 1 or (before < len(bounds) and bounds[before] < end)


def _span(value: torch.Tensor) -> tuple[int, int]:
    begin, sizes = value.data_ptr(), zip(value.shape, value.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in sizes) if value.numel() else -1
    return begin, begin + (last + 1) * value.itemsize


def _picker(numbers: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Return a function that picks the values with these indices."""
    if len(numbers) < 2:
        return lambda values: tuple(values[i] for i in numbers)
    return itemgetter(*numbers)


def _error_text(error: BaseException) -> str:
    """Return the text of an error; the failed end of a capture is replaced by its first cause."""
    first = error.__context__ or error
    return f"{type(first).__name__}: {str(first).strip()[:300]}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
