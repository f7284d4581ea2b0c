"""Time of each kernel in calls of a compiled model, as torch's profiler measures it."""

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch._C._autograd import DeviceType
from torch.profiler import profile

TIMED_RUNS = 3  # profiled calls, after a warm-up
REST = "everything else: Python, allocation, kernels without a record"

_GRAPH = "## Call CompiledFxGraph"  # how Inductor's records of a compiled graph begin
_NUMBERED = re.compile(r"^graph_\d+_")  # begins the records of Inductor's C++ kernels
_NODE = re.compile(r" \[(\w+)\]$")  # ends the records of this package's kernels
_SHIM = re.compile(r"^aoti_torch_(?:cpu|cuda|xpu)_")


@dataclass(frozen=True)
class KernelTime:
    """One kernel: its calls and its time in one call of the model, averaged over the timed calls.

    Time on a GPU is that of the device, on a CPU that of the calling thread.
    """

    name: str
    calls: float  # 0 for the rest
    microseconds: float


@contextlib.contextmanager
def recorded_kernels() -> Iterator[None]:
    """Let what is compiled inside record each kernel for the profiler (C++ on CPUs)."""
    from torch._inductor import config

    inductor: Any = config
    with inductor.patch({"cpp.enable_kernel_profile": True}):
        yield


def time_kernels(call: Callable[[], Any]) -> tuple[KernelTime, ...]:
    """Run `call` once and then `TIMED_RUNS` times under the profiler; slowest kernel first."""
    return _kernel_times(_profile(call))


def time_nodes(call: Callable[[], Any]) -> dict[str, KernelTime]:
    """Return the time of each kernel of this package in C++ code, by its node of the graph."""
    times: dict[str, KernelTime] = {}
    for title, calls, microseconds in _sums(_profile(call)):
        if node := _NODE.search(title):
            times[node[1]] = KernelTime(_NODE.sub("", title), calls, microseconds)
    return times


def _profile(call: Callable[[], Any]) -> list[Any]:
    """Return the events of `TIMED_RUNS` calls, after a warm-up."""
    call()
    with profile() as profiler:
        for _ in range(TIMED_RUNS):
            call()
    return list(profiler.events() or ())


def _kernel_times(events: Iterable[Any]) -> tuple[KernelTime, ...]:
    """Return the kernels of these events: those of the GPU if there are any, or the CPU's."""
    times = (KernelTime(*row) for row in _sums(events, by_kernel=True))
    return tuple(sorted(times, key=lambda time: (time.name == REST, -time.microseconds)))


def _sums(events: Iterable[Any], by_kernel: bool = False) -> list[tuple[str, float, float]]:
    """Return name, calls and microseconds in one run; `by_kernel` joins the nodes of a kernel."""
    events = list(events)
    on_gpu = [e for e in events if e.device_type != DeviceType.CPU and not e.is_user_annotation]
    pairs = ((e.name, e.time_range.elapsed_us()) for e in on_gpu) if on_gpu else _on_cpu(events)
    times: dict[str, list[float]] = {}
    for title, microseconds in pairs:
        name = _NODE.sub("", title) if by_kernel else title
        times.setdefault(name, []).append(microseconds)
    return [
        (name, len(row) / TIMED_RUNS * (name != REST), sum(row) / TIMED_RUNS)
        for name, row in times.items()
    ]


def _on_cpu(events: Iterable[Any]) -> Iterator[tuple[str, float]]:
    """Yield kernels and operators called by a graph or in eager mode, and the rest of the time."""
    for event in events:
        parent = event.cpu_parent
        while parent is not None and not _is_kernel(parent):
            parent = parent.cpu_parent
        if parent is not None:
            continue  # a part of a kernel or operator that is counted as a whole
        if _is_kernel(event):
            name = _SHIM.sub("", _NUMBERED.sub("", event.name))
            yield name, event.time_range.elapsed_us()
        elif event.self_cpu_time_total > 0:
            yield REST, event.self_cpu_time_total


def _is_kernel(event: Any) -> bool:
    """Return whether the event is a kernel or an operator, not a wrapper of torch.compile."""
    wrappers = (_GRAPH, "Torch-Compiled Region", "TorchDynamo", "Pregraph", "AOTDispatcher")
    return not event.name.startswith((*wrappers, "CompiledFunction", "ProfilerStep", "##"))
