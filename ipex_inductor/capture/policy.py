"""Whether a graph's calls are launched kernel by kernel or replayed: measured in a call of its own.

The first calls run as they are, as kernels are still chosen in them. Then one is timed; if the host
is what takes the time, it is captured, timed again, and kept only if that is clearly faster.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from operator import itemgetter
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ipex_inductor import compat
from ipex_inductor.capture import cuda
from ipex_inductor.capture.reasons import why_not_results
from ipex_inductor.decisions import GraphReport

NAME = "graph capture"

WARM_UP = 2  # calls
ROUNDS = 5  # of timing; the least counts, as everything else in the process only adds
HOST_BOUND = 0.5  # the part of a call until it returns, from which on it is captured to see
GAIN = 0.8  # of the time of a call that a replay may take, its copies counted
MOVED = 8  # calls in a row with weights elsewhere, after which those addresses are captured
COPIED = 256 << 20  # bytes of inputs and results, of which a graph keeps a copy, at most
CAPTURES = 4  # of a graph: its weights may move so often

Call = Callable[[list[Any]], Any]
Replay = Callable[[tuple[Any, ...]], tuple[Any, ...]]

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
    """The calls of one graph in this process. A graph has no effect but its results.

    `call` is Inductor's code, `static` the numbers of the inputs that stay where they are: weights
    and what was derived from them; `moving` those of all others that it reads. What is decided goes
    into `report`.
    """

    def __init__(
        self, call: Call, static: Sequence[int], moving: Sequence[int], report: GraphReport | None
    ) -> None:
        self._call, self._report = call, report
        self._static, self._moving, self._numbers = _taking(static), _taking(moving), moving
        self._device: cuda.Device | None = None
        self._lock = threading.Lock()
        self._waits = WARM_UP  # calls before one is timed
        self._settled = False  # nothing is captured from now on
        self._captures = 0
        self._graph: tuple[Replay, list[Any]] | None = None  # and what it was captured under

    def __call__(self, inputs: list[Any]) -> Any:
        """Boxed: `inputs` is emptied."""
        graph = self._graph
        if graph is not None:
            return self._replayed(*graph, inputs)
        if self._settled or not self._is_due(inputs):
            return self._call(inputs)
        if not self._lock.acquire(blocking=False):  # another thread is at it
            return self._call(inputs)
        try:
            return self._decide(inputs)
        finally:
            self._lock.release()

    def _is_due(self, inputs: list[Any]) -> bool:
        """Whether this call is the one to be timed."""
        if any(isinstance(value, FakeTensor) for value in inputs):
            return False  # of a device that is not here
        if self._device is None:
            self._device = cuda.Device(inputs[0].device.index or 0)
        if _at_once.get():
            return True
        self._waits -= 1
        return self._waits < 0 and self._device.is_free()

    def _replayed(self, graph: Replay, circumstances: list[Any], inputs: list[Any]) -> Any:
        assert self._device is not None
        if not self._device.is_free():
            return self._call(inputs)
        if _circumstances(self._static(inputs)) != circumstances:
            return self._moved(inputs)
        self._waits = MOVED
        moving = self._moving(inputs)
        inputs.clear()
        with self._lock:
            return graph(moving)

    def _moved(self, inputs: list[Any]) -> Any:
        """Weights lie elsewhere, say: another model's turn, or theirs from now on."""
        self._waits -= 1
        if self._waits <= 0 and self._lock.acquire(blocking=False):
            try:
                self._drop()
                if self._captures < CAPTURES:
                    return self._capture(inputs)
                self._say(f"not captured again: weights moved {CAPTURES} times")
            finally:
                self._lock.release()
        return self._call(inputs)

    def _drop(self) -> None:
        assert self._device is not None
        self._device.settle()
        self._graph = None
        self._waits, self._settled = MOVED, True

    def _decide(self, inputs: list[Any]) -> Any:
        """The results of this call; how all others are made is settled on the way."""
        with compat.unanalysed() if _at_once.get() else contextlib.nullcontext():
            assert self._device is not None
            if _at_once.get():
                for _ in range(WARM_UP):
                    self._call([*inputs])
            if self._settled or self._graph is not None or not self._device.is_free():
                return self._call(inputs)
            return self._capture(inputs)

    def _capture(self, inputs: list[Any]) -> Any:
        device, self._settled = self._device, True
        assert device is not None
        try:
            results, first = device.timed(lambda: self._call([*inputs]))
        except BaseException:
            self._say("not captured: the call that was to be timed failed")
            raise
        try:
            said = self._judged(device, inputs, results, first)
        except Exception as error:
            self._graph = None
            said = f"not captured: {_words(error)}"
        except BaseException:
            self._graph = None
            self._say("not captured: it was interrupted")
            raise
        self._say(said)
        inputs.clear()
        return results

    def _judged(
        self, device: cuda.Device, inputs: list[Any], results: Sequence[Any], first: cuda.Time
    ) -> str:
        """What is to be said; the graph is kept where it is faster."""
        plain = first
        if reason := why_not_results(results, inputs):
            return f"not captured: {reason}"
        tensors = [v for v in (*results, *self._moving(inputs)) if isinstance(v, torch.Tensor)]
        if (size := sum(value.nbytes for value in tensors)) > COPIED:
            return f"not captured: inputs and results of {size >> 20} MiB would be kept once more"
        for _ in range(ROUNDS):
            if plain.host < HOST_BOUND * plain.total:
                return (
                    f"not captured: {_ms(plain.host)} to launch what takes {_ms(plain.total)}, "
                    "so the host does not hold up the device"
                )
            plain = _least(plain, device.timed(lambda: self._call([*inputs]))[1])
        graph = device.capture(self._call, inputs, self._numbers)
        moving, replayed = self._moving(inputs), cuda.Time(float("inf"), float("inf"))
        graph(moving)  # the first replay uploads it
        for _ in range(ROUNDS):
            replayed = _least(replayed, device.timed(lambda: graph(moving))[1])
            plain = _least(plain, device.timed(lambda: self._call([*inputs]))[1])
        times = f"{_ms(replayed.total)} in a CUDA graph, {_ms(plain.total)} kernel by kernel"
        if replayed.total > GAIN * plain.total:
            return f"not captured: a call takes {times}"
        self._captures += 1
        self._waits = MOVED
        self._graph = graph, _circumstances(self._static(inputs))
        return f"captured: a call takes {times}"

    def _say(self, reason: str) -> None:
        if self._report is not None:
            self._report.add("choice", NAME, reason)


def _least(a: cuda.Time, b: cuda.Time) -> cuda.Time:
    return cuda.Time(min(a.host, b.host), min(a.total, b.total))


def _circumstances(weights: Sequence[torch.Tensor]) -> list[Any]:
    """What a replay does not see: where weights are, and what cuDNN is told."""
    return [*compat.cudnn_settings(), *map(torch.Tensor.data_ptr, weights)]


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
