"""Kernel times from the profiler's events: names, averages, and what is counted once."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C._autograd import DeviceType

from ipex_inductor.inspection import kernel_times
from ipex_inductor.inspection.kernel_times import REST, TIMED_RUNS, KernelTime

pytestmark = pytest.mark.unit


@dataclass
class Event:
    """The fields of torch's `FunctionEvent` that are read."""

    name: str
    elapsed: float
    cpu_parent: Any = None
    self_cpu_time_total: float = 0.0
    device_type: Any = DeviceType.CPU
    is_user_annotation: bool = False

    @property
    def time_range(self):
        return SimpleNamespace(elapsed_us=lambda: self.elapsed)


def test_kernels_of_a_graph_are_counted_whole_and_the_rest_is_one_row():
    region = Event("Torch-Compiled Region: 0/0", 100.0, self_cpu_time_total=3.0)
    graph = Event("## Call CompiledFxGraph None ##", 97.0, region, 6.0)
    mine = Event("graph_0_cpp_fused_add_0", 60.0, graph, 60.0)
    library = Event("aoti_torch_cpu__linear_pointwise", 30.0, graph, 10.0)
    inner = Event("aten::empty", 20.0, library, 20.0)
    times = kernel_times._kernel_times([region, graph, mine, library, inner])
    assert times == (
        KernelTime("cpp_fused_add_0", 1 / TIMED_RUNS, 20.0),
        KernelTime("_linear_pointwise", 1 / TIMED_RUNS, 10.0),
        KernelTime(REST, 0.0, 3.0),
    )


def test_kernels_of_this_package_are_timed_by_node_or_together(monkeypatch):
    graph = Event("## Call CompiledFxGraph None ##", 97.0)
    names = [f"ipex_int8 [int8_conv_{n}]" for n in "ab"] * TIMED_RUNS
    events = [Event(name, 6.0, graph) for name in names]
    assert kernel_times._kernel_times(events) == (KernelTime("ipex_int8", 2.0, 12.0),)
    monkeypatch.setattr(kernel_times, "_profile", lambda call: events)
    assert kernel_times.time_nodes(lambda: None) == {
        "int8_conv_a": KernelTime("ipex_int8", 1.0, 6.0),
        "int8_conv_b": KernelTime("ipex_int8", 1.0, 6.0),
    }


def test_kernels_of_a_gpu_alone_are_counted_if_there_are_any():
    events = [
        Event("aten::mm", 50.0, self_cpu_time_total=50.0),
        *(Event("gemm", 6.0, device_type=DeviceType.CUDA) for _ in range(2 * TIMED_RUNS)),
        Event("## Call", 20.0, device_type=DeviceType.CUDA, is_user_annotation=True),
    ]
    assert kernel_times._kernel_times(events) == (KernelTime("gemm", 2.0, 12.0),)


def test_a_call_is_warmed_up_and_profiled():
    runs = []
    x = torch.ones(8, 8)
    times = kernel_times.time_kernels(lambda: runs.append(x @ x))
    assert len(runs) == 1 + TIMED_RUNS
    (product,) = [kernel for kernel in times if kernel.name == "aten::matmul"]
    assert product.calls == 1
    assert product.microseconds > 0
