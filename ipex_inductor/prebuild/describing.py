"""Facts about an absent GPU that torch is given, and cleared of, for any GPU vendor."""

import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ipex_inductor.aot_cache.key import pairs
from ipex_inductor.errors import CompilerNotFoundError
from ipex_inductor.prebuild.changes import Changes, always
from ipex_inductor.templates.build import cpp

INDEX = 0  # the only GPU there is

# Imported before anything is changed: these bind functions of torch.cuda, or look for GPUs.
FIRST = (
    "torch._dynamo.device_interface",
    "torch._inductor.codecache",
    "torch._inductor.compile_fx",
    "torch._inductor.fx_passes.pad_mm",
    "torch._inductor.runtime.triton_heuristics",
    "torch._inductor.triton_bundler",
    "triton",
)
# Modules, and classes in them, whose caches hold facts about the GPU.
REMEMBERING = (
    "ipex_inductor.lowerings.problem.selector_hook",
    "ipex_inductor.lowerings.optimizer.step_cuda",
    "ipex_inductor.optim.launching.launch_groups_cuda",
    "ipex_inductor.optim.norms",
    "ipex_inductor.templates.tensor_reader.look_cpp",
    "torch._inductor.codecache.CacheBase",
    "torch._inductor.codegen.cuda.cuda_env",
    "torch._inductor.comm_analysis",
    "torch._inductor.runtime.hints.DeviceProperties",
    "torch._inductor.utils",
    "torch.utils._triton",
)


@functools.cache
def guard_of(source: Path) -> Any:
    """Return the library built from that file, cached for each torch and compiler.

    Raises `CompilerNotFoundError`.
    """
    name = {"kernel": f"guard of {source.stem} devices"}
    try:
        return cpp.load(source.read_text, pairs(name), True)
    except cpp.NotBuiltError as error:
        advice = "`apt-get install g++`, or set CXX; `ipex-inductor doctor` checks it."
        raise CompilerNotFoundError(
            "a C++ compiler that builds the guard of described devices", str(error), advice
        ) from error


def describe_to_dynamo(
    changes: Changes, usual: Any, kind: str, properties: SimpleNamespace
) -> None:
    """Have Dynamo's interface of a GPU kind use the current functions of torch's module.

    The interface bound functions of that module at import.

    Args:
        changes: Takes the undo actions.
        usual: The interface class of that kind.
        kind: "cuda" or "xpu".
        properties: Device properties that workers see.
    """
    from torch._dynamo.device_interface import device_interfaces

    module: Any = getattr(torch, kind)
    bound = (
        *("current_device", "device_count", "get_device_properties", "is_bf16_supported"),
        *("memory_allocated", "set_device", "synchronize"),
    )
    members = {name: staticmethod(getattr(module, name)) for name in bound}
    members |= {"get_raw_stream": staticmethod(always(0))}
    members |= {
        name: staticmethod(always(INDEX)) for name in ("exchange_device", "maybe_exchange_device")
    }
    answers = {"current_device": INDEX, "get_device_properties": properties}
    worker = {name: staticmethod(always(answer)) for name, answer in answers.items()}
    members["Worker"] = type("Worker", (usual.Worker,), worker)  # type: ignore[assignment]
    before = dict(device_interfaces)
    changes.callback(device_interfaces.update, before)
    changes.callback(device_interfaces.clear)
    described = type("DescribedInterface", (usual,), members)
    device_interfaces.update(dict.fromkeys((kind, f"{kind}:{INDEX}"), described))


def describe_to_fake_tensors(changes: Changes) -> None:
    """Let fake tensors be created without a device."""
    from torch._subclasses import fake_tensor

    changes.set(fake_tensor, init_gpu_context=always(None))
    changes.set(fake_tensor.FakeTensorMode, avoid_device_init=property(lambda self: True))
    changes.set(torch._C, _ensureCUDADeviceGuardSet=always(None))  # ours is there


def describe_to_passes(changes: Changes) -> None:
    """Keep Inductor's graph passes from computing on the device or timing it."""
    from torch._inductor.constant_folding import ConstantFolder
    from torch._inductor.fx_passes import pad_mm

    evaluate: Any = ConstantFolder.run_node
    on_cpu: Any = _OnCpu

    def run_node(self: Any, node: Any) -> Any:
        with on_cpu():  # it computes constants from real tensors
            return evaluate(self, node)

    changes.set(ConstantFolder, run_node=run_node)
    changes.set(pad_mm, _should_pad=always(False))  # it would time kernels


class _OnCpu(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Creates tensors on the CPU that are to be created on the GPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*map(_to_cpu, args), **{n: _to_cpu(v) for n, v in (kwargs or {}).items()})


def _to_cpu(value: Any) -> Any:
    """Return the CPU device for a GPU device, any other value unchanged."""
    on_gpu = isinstance(value, torch.device) and value.type in ("cuda", "xpu")
    return torch.device("cpu") if on_gpu else value


def forget_answers() -> None:
    """Clear all caches of facts about the real GPU or the described one."""
    for path in REMEMBERING:
        for owner in _find_owners(path):
            for value in vars(owner).values():
                cached = getattr(value, "__func__", value)
                if isinstance(cached, functools._lru_cache_wrapper):
                    cached.cache_clear()


def _find_owners(place: str) -> Iterator[Any]:
    """Yield the module or class of that path, if its module is imported."""
    if place in sys.modules:
        yield sys.modules[place]
    module, _, name = place.rpartition(".")
    if hasattr(sys.modules.get(module), name) and place not in sys.modules:
        yield getattr(sys.modules[module], name)
