"""Timers for each kind of device, and buffers large enough to defeat its caches."""

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

# Least duration of a sample on a CPU and of a captured graph on a GPU, in microseconds: far above
# the resolution of a clock, far below the length of an interruption.
CPU_SAMPLE, GPU_SAMPLE = 200.0, 400.0
MOST_CYCLES = 1 << 26  # longest hold-up of a queue: 30 ms
CPU_SAMPLES = 4  # the round is the least of them, since disturbances only add time
WARM = 3  # warm-up calls

MOST_BUFFERS, MOST_BYTES = 256, 1 << 30
FEWEST_BUFFERS = 8  # on a GPU: with more, the address of one matters less
# Largest share of a GPU's free memory in each of the three allocations that separate new buffers
# from the old: without them a process gets the old pages again, with whatever suits them.
JUNK = 0.125
LEAST_JUNK, CPU_JUNK = 1 << 20, 256 << 20  # bytes
UNKNOWN_CACHE = 32 << 20
LARGEST_CPU_CACHE = 64 << 20  # larger caches serve more cores than one op uses


class CpuClock:
    """Wall time of samples; each continues in the row of buffers where the last one stopped."""

    def prepare(self, run: Run, buffers: Sequence[Sequence[Tensor]], sizes: int = 1) -> Round:
        """Return a round of samples; see `Clock`."""
        once = min(_sample(run, buffers[:sizes]) for _ in range(WARM))
        calls = sizes * max(1, math.ceil(CPU_SAMPLE / once))
        endless = itertools.cycle(buffers)

        def round() -> float:
            samples = ([*itertools.islice(endless, calls)] for _ in range(CPU_SAMPLES))
            return min(_sample(run, sample) for sample in samples) / calls

        return round


class EventClock:
    """Events around calls that are submitted one by one, for devices without graphs."""

    def __init__(self, device: Any) -> None:
        self._device = device  # torch.cuda, torch.xpu

    def prepare(self, run: Run, buffers: Sequence[Sequence[Tensor]], sizes: int = 1) -> Round:
        """Return a round between two events; see `Clock`."""
        self._warm(run, buffers)
        repeat = self._repeat(run, buffers)
        calls = [*buffers] * repeat

        def body() -> None:
            for inputs in calls:
                run(inputs)

        return _add_rest(lambda: self._time_between_events(body) / len(calls))

    def _warm(self, run: Run, buffers: Sequence[Sequence[Tensor]]) -> None:
        """Run each set of inputs once and wait for the device."""
        for inputs in buffers:
            run(inputs)
        self._device.synchronize()

    def _repeat(self, run: Run, buffers: Sequence[Sequence[Tensor]]) -> int:
        """Return how often to repeat all calls for a round of `GPU_SAMPLE`."""

        def body() -> None:
            for inputs in buffers:
                run(inputs)

        return max(1, math.ceil(GPU_SAMPLE / self._time_between_events(body)))

    def _time_between_events(self, body: Any) -> float:
        """Return the device's microseconds between events around `body`."""
        start, end = (self._device.Event(enable_timing=True) for _ in range(2))
        start.record()
        body()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3


class GraphClock(EventClock):
    """A captured graph of many calls, which excludes the host's time to submit them."""

    def __init__(self, device: Any) -> None:
        super().__init__(device)
        self._side = device.Stream()  # one for all, since cuBLAS keeps a workspace for each

    def prepare(self, run: Run, buffers: Sequence[Sequence[Tensor]], sizes: int = 1) -> Round:
        """Return a round that replays a captured graph; see `Clock`."""
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
        # The graph holds only addresses, so this closure keeps `buffers` alive.
        return _add_rest(lambda: self._time_between_events(graph.replay) / (repeat * len(buffers)))


class QueuedClock(EventClock):
    """Events around calls that wait on the device until the host has submitted all of them.

    It excludes the host's time as `GraphClock` does, but captures nothing, so it may be used in a
    process that runs other work: a capture forbids calls of other threads.
    """

    def __init__(self, device: Any) -> None:
        super().__init__(device)
        self._cycles = 100_000  # of the device's clock, by which calls are held up

    def prepare(self, run: Run, buffers: Sequence[Sequence[Tensor]], sizes: int = 1) -> Round:
        """Return a round without a pause, as it is one of few; see `Clock`."""
        self._warm(run, buffers)
        calls = [*buffers] * self._repeat(run, buffers)

        def body() -> None:
            for inputs in calls:
                run(inputs)

        return lambda: self._time_between_events(body) / len(calls)

    def _time_between_events(self, body: Any) -> float:
        """Return the microseconds of `body` on the device, which starts once all is submitted.

        Raises `RuntimeError` if it starts earlier however long it is held up: the time would
        contain the host's.
        """
        cycles = self._cycles
        while cycles <= MOST_CYCLES:
            start, end = (self._device.Event(enable_timing=True) for _ in range(2))
            self._device._sleep(cycles)
            start.record()
            body()
            end.record()
            started_early = start.query()
            end.synchronize()
            if not started_early:
                self._cycles = cycles
                return float(start.elapsed_time(end)) * 1e3
            cycles *= 2
        raise RuntimeError(
            "the device ran calls before the host had submitted all of them: the host is busy, or "
            "a call waits for the device"
        )


def queued_clock_of(device: torch.device) -> Clock:
    """Return a timer for `device` that captures nothing."""
    return QueuedClock(torch.cuda) if device.type == "cuda" else clock_of(device)


def clock_of(device: torch.device) -> Clock:
    """Return the best timer for `device`."""
    if device.type == "cuda":
        return GraphClock(torch.cuda)
    if device.type == "xpu":
        return EventClock(torch.xpu)
    return CpuClock()


def buffers_against_caches(device: torch.device, size: int, fewest: int = FEWEST_BUFFERS) -> int:
    """Return how many sets of inputs of `size` bytes exceed the last cache twice over.

    Args:
        device: the device.
        size: bytes of one set.
        fewest: sets on a GPU, at least.
    """
    wanted = math.ceil(2 * _cache(device) / max(1, size))
    if device.type != "cpu":
        wanted = max(wanted, fewest)
    most = min(MOST_BUFFERS, max(1, MOST_BYTES // max(1, size)))
    return max(1, min(wanted, most))


def relocate_buffers(buffers: Sequence[Sequence[Tensor]], seed: int) -> list[list[Tensor]]:
    """Return copies of `buffers` at other addresses for each `seed`.

    No captured graph may be alive.
    """
    device = buffers[0][0].device
    if device.type == "cuda":
        torch._C._cuda_clearCublasWorkspaces()  # the next capture allocates them elsewhere
    if device.type != "cpu":
        getattr(torch, device.type).empty_cache()  # else the allocator would reuse old addresses
    junk = [torch.empty(n, dtype=torch.uint8, device=device) for n in _junk(device, seed)]
    result = [[*map(copy, inputs)] for inputs in buffers]
    del junk
    return result


def _junk(device: torch.device, seed: int) -> list[int]:
    """Return the sizes in bytes of three allocations that shift the addresses of copies."""
    most = CPU_JUNK
    if device.type != "cpu":
        free, _ = getattr(torch, device.type).mem_get_info(device)
        most = max(LEAST_JUNK, int(JUNK * free))
    return random.Random(seed).choices(range(LEAST_JUNK, most + 1), k=3)


def _add_rest(round: Round) -> Round:
    """Return a round followed by an equal pause: GEMMs without pauses would lower the clock.

    On an H200 by a tenth within a tenth of a second, and not equally for two kernels.
    """

    def run_and_rest() -> float:
        start = time.monotonic()
        time_taken = round()
        time.sleep(time.monotonic() - start)
        return time_taken

    return run_and_rest


def _cache(device: torch.device) -> int:
    """Return the size of the device's last cache in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    if device.type == "cpu":
        names = ("SC_LEVEL3_CACHE_SIZE", "SC_LEVEL2_CACHE_SIZE")
        sizes = (os.sysconf(n) for n in names if n in os.sysconf_names)
        return min(next((n for n in sizes if n > 0), UNKNOWN_CACHE), LARGEST_CPU_CACHE)
    return UNKNOWN_CACHE


def _sample(run: Run, buffers: Sequence[Sequence[Tensor]]) -> float:
    """Return the microseconds of one call on each of `buffers`, in sum."""
    start = time.perf_counter_ns()
    for inputs in buffers:
        run(inputs)
    return (time.perf_counter_ns() - start) / 1e3
