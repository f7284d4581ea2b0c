"""What of torch is told of a GPU that is not here, and forgets of it, whosever GPU it is."""

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

# What is imported before anything is changed: it binds functions of torch.cuda, or looks for GPUs.
FIRST = (
    "torch._dynamo.device_interface",
    "torch._inductor.codecache",
    "torch._inductor.compile_fx",
    "torch._inductor.fx_passes.pad_mm",
    "torch._inductor.runtime.triton_heuristics",
    "torch._inductor.triton_bundler",
    "triton",
)
# Modules, and classes in them, whose caches hold what they were told of the GPU.
REMEMBERING = (
    "ipex_inductor.lowerings.problem.selector_hook",
    "ipex_inductor.lowerings.optimizer.step_cuda",
    "ipex_inductor.optim.launch_groups_cuda",
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
    """The library of that file, which the kernel cache has for each torch and compiler.

    Raises `CompilerNotFoundError`.
    """
    name = {"kernel": f"guard of {source.stem} devices"}
    try:
        return cpp.load(source.read_text, pairs(name), True)
    except cpp.NotBuiltError as error:
        todo = "`apt-get install g++`, or set CXX; `ipex-inductor doctor` checks it."
        raise CompilerNotFoundError(
            "a C++ compiler that builds the guard of described devices", str(error), todo
        ) from error


def describe_to_dynamo(
    changes: Changes, usual: Any, kind: str, properties: SimpleNamespace
) -> None:
    """Have Dynamo's interface `usual` of a kind of GPU say what torch's module of it says by now.

    It bound functions of that at import.
    """
    from torch._dynamo.device_interface import device_interfaces as known

    here: Any = getattr(torch, kind)
    bound = (
        *("current_device", "device_count", "get_device_properties", "is_bf16_supported"),
        *("memory_allocated", "set_device", "synchronize"),
    )
    members = {name: staticmethod(getattr(here, name)) for name in bound}
    members |= {"get_raw_stream": staticmethod(always(0))}
    members |= {
        name: staticmethod(always(INDEX)) for name in ("exchange_device", "maybe_exchange_device")
    }
    asked = {"current_device": INDEX, "get_device_properties": properties}
    worker = {name: staticmethod(always(answer)) for name, answer in asked.items()}
    members["Worker"] = type("Worker", (usual.Worker,), worker)  # type: ignore[assignment]
    before = dict(known)
    changes.callback(known.update, before)
    changes.callback(known.clear)
    described = type("DescribedInterface", (usual,), members)
    known.update(dict.fromkeys((kind, f"{kind}:{INDEX}"), described))


def describe_to_fake_tensors(changes: Changes) -> None:
    """Let fake tensors be made without a device."""
    from torch._subclasses import fake_tensor

    changes.set(fake_tensor, init_gpu_context=always(None))
    changes.set(fake_tensor.FakeTensorMode, avoid_device_init=property(lambda self: True))
    changes.set(torch._C, _ensureCUDADeviceGuardSet=always(None))  # ours is there


def describe_to_passes(changes: Changes) -> None:
    """Let Inductor's passes over graphs neither compute on the device nor time it."""
    from torch._inductor.constant_folding import ConstantFolder
    from torch._inductor.fx_passes import pad_mm

    evaluate: Any = ConstantFolder.run_node
    on_cpu: Any = _OnCpu

    def run_node(self: Any, node: Any) -> Any:
        with on_cpu():  # it computes what is constant, of real tensors
            return evaluate(self, node)

    changes.set(ConstantFolder, run_node=run_node)
    changes.set(pad_mm, _should_pad=always(False))  # that is timed


class _OnCpu(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes on the CPU what is to be made on the GPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*map(_moved, args), **{n: _moved(v) for n, v in (kwargs or {}).items()})


def _moved(value: Any) -> Any:
    on_gpu = isinstance(value, torch.device) and value.type in ("cuda", "xpu")
    return torch.device("cpu") if on_gpu else value


def forget_answers() -> None:
    """Forget what was remembered of the GPU that is, or that was described."""
    for place in REMEMBERING:
        for owner in _loaded(place):
            for value in vars(owner).values():
                cached = getattr(value, "__func__", value)
                if isinstance(cached, functools._lru_cache_wrapper):
                    cached.cache_clear()


def _loaded(place: str) -> Iterator[Any]:
    if place in sys.modules:
        yield sys.modules[place]
    module, _, name = place.rpartition(".")
    if hasattr(sys.modules.get(module), name) and place not in sys.modules:
        yield getattr(sys.modules[module], name)
