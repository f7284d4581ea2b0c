"""An Intel GPU that is not here, as torch and Inductor see it while graphs for it are read.

torch makes fake tensors on `xpu` in builds without it too; autograd wants a guard. Inductor lowers
such graphs and writes their code; Triton compiles none of it here, as its builds for other GPUs
have no code generator for these. Kernels in SYCL are noted where they would be loaded.
"""

import contextlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from ipex_inductor import compat
from ipex_inductor.errors import DeviceError, TargetError
from ipex_inductor.prebuild.changes import Changes, always
from ipex_inductor.prebuild.describing import (
    FIRST,
    INDEX,
    describe_to_dynamo,
    describe_to_fake_tensors,
    describe_to_passes,
    forget_answers,
    guard_of,
)
from ipex_inductor.target.device import Target
from ipex_inductor.templates.sycl import calls
from ipex_inductor.templates.sycl import device as sycl_device
from ipex_inductor.templates.sycl.source import Source

SOURCE = Path(__file__).with_name("described_xpu.cpp")
LANES = (8, 16, 32)  # of sub-groups; a target has the narrowest
GIB = 1 << 30


@contextlib.contextmanager
def device(target: Target) -> Iterator[list[Source]]:
    """`xpu:0` is `target` meanwhile, in this process; gives the sources whose kernels were asked.

    Raises `TargetError` for what is no Intel GPU, `DeviceError` where torch sees a real one.
    """
    if target.kind != "xpu":
        raise TargetError("an Intel GPU", str(target), "See described.device for others.")
    if torch.xpu.is_available():
        todo = "Hide it: ZE_AFFINITY_MASK, or ONEAPI_DEVICE_SELECTOR=opencl:cpu."
        raise DeviceError("a process that sees no GPU", torch.xpu.get_device_name(), todo)
    guard = guard_of(SOURCE)
    for name in FIRST:
        importlib.import_module(name)
    interfaces = importlib.import_module("torch._dynamo.device_interface")
    interfaces.get_interface_for_device("cpu")  # registers all of them, as torch finds them
    asked: list[Source] = []
    with Changes() as changes:
        changes.callback(_forget)
        guard.ipex_describe_xpu()
        changes.callback(guard.ipex_forget_xpu)
        properties = _properties(target)
        _describe_xpu(changes, properties)
        describe_to_dynamo(changes, interfaces.XpuInterface, "xpu", properties)
        describe_to_fake_tensors(changes)
        describe_to_passes(changes)
        _describe_to_triton(changes, target)
        described: Any = _Described(target, asked)
        changes.set(sycl_device, XpuDevice=lambda index: described)
        _forget()
        with compat.compiles_in_this_process():
            yield asked


class _Described:
    """In the place of a device that would load kernels: it has all that they need."""

    waits = False

    def __init__(self, target: Target, asked: list[Source]) -> None:
        self.name, self.arch, self._asked = target.name, target.arch, asked
        self.facts = {"type": "gpu", "matrix": True, "fp16": True, "fp64": True}

    def load(self, source: Source) -> SimpleNamespace:
        """Note it; its kernels are in nobody's way until they are launched."""
        if source not in self._asked:
            self._asked.append(source)
        return SimpleNamespace(kernel=always(None))


def _forget() -> None:
    forget_answers()
    sycl_device.device_of.cache_clear()
    calls.forget()


def _properties(target: Target) -> SimpleNamespace:
    """What torch.xpu.get_device_properties would say."""
    major, minor = map(int, target.arch.removeprefix("xe:").split("."))
    return SimpleNamespace(
        name=target.name,
        architecture=(major << 22 | minor << 14) << 8,  # as target.xe reads it
        gpu_subslice_count=target.multiprocessors,
        gpu_eu_count=8 * target.multiprocessors,
        max_compute_units=8 * target.multiprocessors,
        max_work_group_size=1024,
        max_num_sub_groups=64,
        sub_group_sizes=[lanes for lanes in LANES if lanes >= (target.subgroup or 0)],
        local_mem_size=target.shared_memory,
        total_memory=target.memory or GIB,
        has_fp16=True,
        has_fp64=True,
        has_subgroup_matrix_multiply_accumulate=True,
    )


def _describe_xpu(changes: Changes, properties: SimpleNamespace) -> None:
    answers: dict[str, Any] = {
        "is_available": True,
        "_is_compiled": True,
        "device_count": 1,
        "current_device": INDEX,
        "get_device_properties": properties,
        "get_device_capability": vars(properties),
        "get_device_name": properties.name,
        "is_bf16_supported": True,
        "is_current_stream_capturing": False,
        "memory_allocated": 0,
        "synchronize": None,
        "set_device": None,
        "_exchange_device": INDEX,
        "_maybe_exchange_device": INDEX,
        "_lazy_init": None,
        "set_rng_state": None,
        "current_stream": SimpleNamespace(query=always(True), sycl_queue=0),
    }
    changes.set(torch.xpu, **{name: always(answer) for name, answer in answers.items()})
    changes.set(torch.xpu, get_rng_state=lambda *_, **__: torch.zeros(16, dtype=torch.uint8))


def _describe_to_triton(changes: Changes, target: Target) -> None:
    """Its driver, which templates of Inductor's ask while they are listed."""
    from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]
    from triton.runtime import driver  # type: ignore[import-untyped]

    stub = SimpleNamespace(
        get_current_target=always(GPUTarget("xpu", target.arch, target.subgroup or 16)),
        get_current_device=always(INDEX),
        get_current_stream=always(0),
        set_current_device=always(None),
        get_device_interface=always(torch.xpu),
        get_active_torch_device=always(torch.device("xpu", INDEX)),
        is_active=always(True),
    )
    changes.set(driver, _active=stub)
    # Written beside each of our templates; a Triton without a code generator has none to tell.
    changes.set(torch.utils._triton, triton_hash_with_backend=always(f"none for {target.arch}"))
