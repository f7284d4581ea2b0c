"""How a round is timed on each kind of device, and how much memory defeats its caches."""

import itertools
import math
import os
import random
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ipex_inductor.autotune.measure import Clock, Round, Run, copy

# A sample on the CPU lasts at least so long, a captured graph on a GPU so long, in microseconds:
# far above what a clock resolves, far below what an interruption lasts.
CPU_SAMPLE, GPU_SAMPLE = 200.0, 400.0
CPU_SAMPLES = 4  # the least of them is the round's: what disturbs a CPU only adds
WARM = 3  # calls before the first that counts

MOST_BUFFERS, MOST_BYTES = 256, 1 << 30
FEWEST_BUFFERS = 8  # of a GPU: where one of them lies counts for less
# Of a GPU's free memory, at most so much thrice lies between its buffers and where the last ones
# lay: a process that frees little gets the same pages again, and keeps what they are good at.
JUNK = 0.125
LEAST_JUNK, CPU_JUNK = 1 << 20, 256 << 20  # bytes
UNKNOWN_CACHE = 32 << 20
LARGEST_CPU_CACHE = 64 << 20  # shared by more cores than work on one op


class CpuClock:
    """Wall time of samples, which go on where the last one stopped in the row of buffers."""

    def prepare(self, run: Run, buffers: Sequence[Sequence[Tensor]], sizes: int = 1) -> Round:
        """See `Clock`."""
        once = min(_sample(run, buffers[:sizes]) for _ in range(WARM))
        calls = sizes * max(1, math.ceil(CPU_SAMPLE / once))
        endless = itertools.cycle(buffers)

        def round() -> float:
            samples = ([*itertools.islice(endless, calls)] for _ in range(CPU_SAMPLES))
            return min(_sample(run, sample) for sample in samples) / calls

        return round


class EventClock:
    """Events around calls that are submitted one by one: for devices without graphs."""

    def __init__(self, device: Any) -> None:
        self._device = device  # torch.cuda, torch.xpu

    def prepare(self, run: Run, buffers: Sequence[Sequence[Tensor]], sizes: int = 1) -> Round:
        """See `Clock`."""
        self._warm(run, buffers)
        repeat = self._repeat(run, buffers)
        calls = [*buffers] * repeat

        def body() -> None:
            for inputs in calls:
                run(inputs)

        return _resting(lambda: self._between(body) / len(calls))

    def _warm(self, run: Run, buffers: Sequence[Sequence[Tensor]]) -> None:
        for inputs in buffers:
            run(inputs)
        self._device.synchronize()

    def _repeat(self, run: Run, buffers: Sequence[Sequence[Tensor]]) -> int:
        def body() -> None:
            for inputs in buffers:
                run(inputs)

        return max(1, math.ceil(GPU_SAMPLE / self._between(body)))

    def _between(self, body: Any) -> float:
        """Microseconds of the device from before `body` to after it."""
        start, end = (self._device.Event(enable_timing=True) for _ in range(2))
        start.record()
        body()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3


class GraphClock(EventClock):
    """A captured graph of many calls, so that what a host takes to submit them does not count."""

    def __init__(self, device: Any) -> None:
        super().__init__(device)
        self._side = device.Stream()  # one for all: cuBLAS keeps a workspace for each

    def prepare(self, run: Run, buffers: Sequence[Sequence[Tensor]], sizes: int = 1) -> Round:
        """See `Clock`."""
        self._side.wait_stream(self._device.current_stream())
        with self._device.stream(self._side):
            self._warm(run, buffers)
        self._device.current_stream().wait_stream(self._side)
        repeat = self._repeat(run, buffers)
        graph = self._device.CUDAGraph()
        with self._device.graph(graph):
            for inputs in [*buffers] * repeat:
                run(inputs)
        graph.replay()
        self._device.synchronize()
        # The graph knows addresses only: that `buffers` stay is for this closure to see to.
        return _resting(lambda: self._between(graph.replay) / (repeat * len(buffers)))


def clock_of(device: torch.device) -> Clock:
    """The best there is for `device`."""
    if device.type == "cuda":
        return GraphClock(torch.cuda)
    if device.type == "xpu":
        return EventClock(torch.xpu)
    return CpuClock()


def buffers_against_caches(device: torch.device, size: int) -> int:
    """How many sets of inputs of `size` bytes are larger than `device`'s last cache, twice."""
    wanted = math.ceil(2 * _cache(device) / max(1, size))
    if device.type != "cpu":
        wanted = max(wanted, FEWEST_BUFFERS)
    most = min(MOST_BUFFERS, max(1, MOST_BYTES // max(1, size)))
    return max(1, min(wanted, most))


def moved(buffers: Sequence[Sequence[Tensor]], seed: int) -> list[list[Tensor]]:
    """Copies of `buffers`, elsewhere in memory for each `seed`; no captured graph may be alive."""
    device = buffers[0][0].device
    if device.type == "cuda":
        torch._C._cuda_clearCublasWorkspaces()  # made anew by the next capture, elsewhere too
    if device.type != "cpu":
        getattr(torch, device.type).empty_cache()  # or they would lie where others lay before
    junk = [torch.empty(n, dtype=torch.uint8, device=device) for n in _junk(device, seed)]
    result = [[*map(copy, inputs)] for inputs in buffers]
    del junk
    return result


def _junk(device: torch.device, seed: int) -> list[int]:
    """How many bytes lie in between, thrice."""
    most = CPU_JUNK
    if device.type != "cpu":
        free, _ = getattr(torch, device.type).mem_get_info(device)
        most = max(LEAST_JUNK, int(JUNK * free))
    return random.Random(seed).choices(range(LEAST_JUNK, most + 1), k=3)


def _resting(round: Round) -> Round:
    """Idle for as long as each round took: large products at a stretch would lower the clock.

    On an H200 by a tenth within a tenth of a second, and of two kernels one more than the other.
    """

    def rested() -> float:
        start = time.monotonic()
        found = round()
        time.sleep(time.monotonic() - start)
        return found

    return rested


def _cache(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    if device.type == "cpu":
        names = ("SC_LEVEL3_CACHE_SIZE", "SC_LEVEL2_CACHE_SIZE")
        found = (os.sysconf(n) for n in names if n in os.sysconf_names)
        return min(next((n for n in found if n > 0), UNKNOWN_CACHE), LARGEST_CPU_CACHE)
    return UNKNOWN_CACHE


def _sample(run: Run, buffers: Sequence[Sequence[Tensor]]) -> float:
    """Microseconds that one call on each of `buffers` takes, together."""
    start = time.perf_counter_ns()
    for inputs in buffers:
        run(inputs)
    return (time.perf_counter_ns() - start) / 1e3
