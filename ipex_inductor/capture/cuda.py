"""Time, capture and replay calls of a graph on an NVIDIA GPU: the only file that uses CUDA."""

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
_cuda: Any = torch.cuda  # partly untyped


@dataclass(frozen=True)
class Time:
    """Seconds of a call: until it returned (`host`), and until the device was done (`total`)."""

    host: float
    total: float


class Device:
    """One GPU, which need not be the current one."""

    def __init__(self, index: int) -> None:
        self.index = index

    def is_free(self) -> bool:
        """Return True if a call would run now: it is neither traced nor captured by the caller."""
        return not compat.is_traced() and not torch.cuda.is_current_stream_capturing()

    def time_call(self, call: Callable[[], Any]) -> tuple[Any, Time]:
        """Return the results and the times of a call that starts on an idle stream."""
        stream = _cuda.current_stream(self.index)
        stream.synchronize()
        begin = time.perf_counter()
        results = call()
        host = time.perf_counter() - begin
        stream.synchronize()
        return results, Time(host, time.perf_counter() - begin)

    def settle(self) -> None:
        """Wait until all streams are done with memory that may be freed now."""
        torch.cuda.synchronize(self.index)

    def capture(self, call: Call, inputs: Sequence[torch.Tensor], moving: Sequence[int]) -> "Graph":
        """Capture a call on these inputs as a CUDA graph without running it.

        Raises what the capture raises.

        Args:
            call: the graph's code.
            inputs: its inputs.
            moving: indices of inputs that get copied into the graph's own memory; all other inputs
                are read and written at their addresses.
        """
        graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        stay = (value for i, value in enumerate(inputs) if i not in moving)
        # Such tensors are written only in inference mode.
        inference = any(value.is_inference() for value in stay)
        with torch.cuda.device(self.index), torch.inference_mode(False), torch.no_grad():
            side = _cuda.Stream()
            capturing = torch.cuda.graph(
                graph, pool=pool, stream=side, capture_error_mode="thread_local"
            )
            # cuBLAS would use a workspace that this graph does not keep alive.
            compat.drop_cublas_memory()
            try:
                # If a capture cannot end, torch leaves its stream as the current one.
                with torch.cuda.stream(side), capturing:
                    call_inputs, buffers = [*inputs], [_empty_like(inputs[i]) for i in moving]
                    for i, buffer in zip(moving, buffers, strict=True):
                        call_inputs[i] = buffer
                    with torch.inference_mode(inference), torch.no_grad():
                        results = call(call_inputs)
            except BaseException:
                compat.end_capture(self.index, pool)
                _recover()
                raise
            finally:
                compat.drop_cublas_memory()
        return Graph(graph, buffers, results, self.index)


def _empty_like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


def _recover() -> None:
    """Capture an empty graph: after a failed capture torch's random generators wait for one."""
    with contextlib.suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the warning that the graph is empty
        side = _cuda.Stream()
        with torch.cuda.stream(side):
            empty = torch.cuda.CUDAGraph()
            with torch.cuda.graph(empty, stream=side, capture_error_mode="thread_local"):
                pass


class Graph:
    """A captured call, with buffers for moving inputs and results that the next call overwrites.

    Called by one thread at a time, on any stream.
    """

    def __init__(
        self,
        graph: torch.cuda.CUDAGraph,
        buffers: list[torch.Tensor],
        results: Sequence[Any],
        index: int,
    ) -> None:
        self._graph, self._places, self._index = graph, buffers, index
        self._results = list(results)
        self._numbers = [i for i, r in enumerate(results) if isinstance(r, torch.Tensor)]
        self._own = tuple(results[i] for i in self._numbers)
        self._fresh = [
            functools.partial(
                torch.empty_strided, r.shape, r.stride(), dtype=r.dtype, device=r.device
            )
            for r in self._own
        ]
        self._stream: Any = None  # stream of the latest call
        self._done = _cuda.Event()

    def __call__(self, moving: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
        """Copy `moving` into the buffers, replay, and return fresh results."""
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
