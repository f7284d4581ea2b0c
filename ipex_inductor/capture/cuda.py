"""Calls of a graph on an NVIDIA GPU: timed, captured, replayed. All that touches CUDA is here."""

import contextlib
import functools
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ipex_inductor import compat

Call = Callable[[list[Any]], Any]
_cuda: Any = torch.cuda  # of which some has no types


@dataclass(frozen=True)
class Time:
    """Seconds of a call: until it returned, and until the device was done."""

    host: float
    total: float


class Device:
    """One GPU, which need not be the current one."""

    def __init__(self, index: int) -> None:
        self.index = index

    def is_free(self) -> bool:
        """Whether what is called now is run: not traced, and not captured by whoever calls."""
        return not compat.is_traced() and not torch.cuda.is_current_stream_capturing()

    def timed(self, call: Callable[[], Any]) -> tuple[Any, Time]:
        """The results of a call that begins when its stream has nothing to do."""
        stream = _cuda.current_stream(self.index)
        stream.synchronize()
        begin = time.perf_counter()
        results = call()
        host = time.perf_counter() - begin
        stream.synchronize()
        return results, Time(host, time.perf_counter() - begin)

    def settle(self) -> None:
        """Wait until all streams are done with what may be freed now."""
        torch.cuda.synchronize(self.index)

    def capture(self, call: Call, inputs: Sequence[torch.Tensor], moving: Sequence[int]) -> "Graph":
        """A call on these inputs as a graph; nothing of it is run yet.

        Those with the numbers `moving` get places in the graph's own memory, the others are read
        and written where they are. Raises what capturing raises.
        """
        graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        stay = (value for i, value in enumerate(inputs) if i not in moving)
        inference = any(value.is_inference() for value in stay)  # written only in such a mode
        with torch.cuda.device(self.index), torch.inference_mode(False), torch.no_grad():
            side = _cuda.Stream()
            capturing = torch.cuda.graph(
                graph, pool=pool, stream=side, capture_error_mode="thread_local"
            )
            # cuBLAS would use memory that another graph, or nobody, keeps for this one.
            compat.drop_cublas_memory()
            try:
                # Where a capture cannot end, torch leaves its stream the current one.
                with torch.cuda.stream(side), capturing:
                    given, places = [*inputs], [_place(inputs[i]) for i in moving]
                    for i, place in zip(moving, places, strict=True):
                        given[i] = place
                    with torch.inference_mode(inference), torch.no_grad():
                        results = call(given)
            except BaseException:
                compat.end_capture(self.index, pool)
                _recover()
                raise
            finally:
                compat.drop_cublas_memory()
        return Graph(graph, places, results, self.index)


def _place(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


def _recover() -> None:
    """Capture nothing: after a capture that could not end torch's random numbers wait for one."""
    with contextlib.suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is empty
        side = _cuda.Stream()
        with torch.cuda.stream(side):
            empty = torch.cuda.CUDAGraph()
            with torch.cuda.graph(empty, stream=side, capture_error_mode="thread_local"):
                pass


class Graph:
    """A captured call: `places` of the inputs that move, results that the next call overwrites.

    Called by one thread at a time, on any stream.
    """

    def __init__(
        self,
        graph: torch.cuda.CUDAGraph,
        places: list[torch.Tensor],
        results: Sequence[Any],
        index: int,
    ) -> None:
        self._graph, self._places, self._index = graph, places, index
        self._results = list(results)
        self._numbers = [i for i, r in enumerate(results) if isinstance(r, torch.Tensor)]
        self._own = tuple(results[i] for i in self._numbers)
        self._fresh = [
            functools.partial(
                torch.empty_strided, r.shape, r.stride(), dtype=r.dtype, device=r.device
            )
            for r in self._own
        ]
        self._stream: Any = None  # of the latest call
        self._done = _cuda.Event()

    def __call__(self, moving: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
        """Fresh results for what the places get."""
        stream = torch.cuda.current_stream(self._index)
        if self._stream is not None and self._stream != stream:
            stream.wait_event(self._done)
        self._stream = stream
        try:
            _copy(self._places, moving)
            self._graph.replay()
            fresh = [make() for make in self._fresh]
            _copy(fresh, self._own)
        finally:
            self._done.record(stream)
        results = [*self._results]
        for number, result in zip(self._numbers, fresh, strict=True):
            results[number] = result
        return tuple(results)


def _copy(to: list[torch.Tensor], values: tuple[torch.Tensor, ...]) -> None:
    if len(to) == 1:
        to[0].copy_(values[0])
    elif to:
        torch._foreach_copy_(to, values)
