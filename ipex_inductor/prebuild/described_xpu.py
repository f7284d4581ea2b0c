"""Description of an absent Intel GPU to torch and Inductor, while graphs for it are read.

torch makes fake tensors on `xpu` in builds without it too; autograd needs a device guard. Inductor
lowers such graphs and writes their code; Triton compiles none of it here, as its builds for other
GPUs have no code generator for these. SYCL kernels are recorded where they would be loaded.
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
    """Describe `target` as `xpu:0` of this process; yield the sources of requested kernels.

    Raises `TargetError` if it is not an Intel GPU, `DeviceError` where torch sees a real one.
    """
    if target.kind != "xpu":
        raise TargetError("an Intel GPU", str(target), "See described.device for others.")
    if torch.xpu.is_available():
        advice = "Hide it: ZE_AFFINITY_MASK, or ONEAPI_DEVICE_SELECTOR=opencl:cpu."
        raise DeviceError("a process that sees no GPU", torch.xpu.get_device_name(), advice)
    guard = guard_of(SOURCE)
    for name in FIRST:
        importlib.import_module(name)
    interfaces = importlib.import_module("torch._dynamo.device_interface")
    interfaces.get_interface_for_device("cpu")  # registers all of them, as torch finds them
    requested: list[Source] = []
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
        described: Any = _Described(target, requested)
        changes.set(sycl_device, XpuDevice=lambda index: described)
        _forget()
        with compat.compiles_in_this_process():
            yield requested


class _Described:
    """A stand-in for a device that would load kernels, with all properties they need."""

    waits = False

    def __init__(self, target: Target, requested: list[Source]) -> None:
        self.name, self.arch, self._asked = target.name, target.arch, requested
        self.facts = {"type": "gpu", "matrix": True, "fp16": True, "fp64": True}

    def load(self, source: Source) -> SimpleNamespace:
        """Record a source and return a stand-in for its kernels, which are never launched."""
        if source not in self._asked:
            self._asked.append(source)
        return SimpleNamespace(kernel=always(None))


def _forget() -> None:
    """Clear the caches that hold facts about the GPU."""
    forget_answers()
    sycl_device.device_of.cache_clear()
    calls.forget()


def _properties(target: Target) -> SimpleNamespace:
    """Return the values of torch.xpu.get_device_properties for the target."""
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
    """Have the functions of torch.xpu describe the target."""
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
    """Replace Triton's driver, which Inductor's templates query while they are listed."""
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
    # Written beside each template; a Triton without a code generator has no hash of its own.
    changes.set(torch.utils._triton, triton_hash_with_backend=always(f"none for {target.arch}"))
