"""Description of an absent GPU to torch, Inductor and Triton, while code is compiled for it.

Nothing runs on it: tensors are fake, kernels are compiled and not loaded. All changes of the
process for that are made by `device` and undone at its end.
"""

import contextlib
import importlib
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from ipex_inductor import compat
from ipex_inductor.aot_cache.entry import Entry
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
from ipex_inductor.templates.build import cuda
from ipex_inductor.templates.build.gpu import BINARIES

LONGEST = 255  # characters of a file's name
SOURCE = Path(__file__).with_name("described.cpp")


@dataclass
class CompiledKernels:
    """The results of compilation inside `device`: Triton kernels by name.

    `untimed`: kernels with several configurations, all of which Inductor times where it can.
    `unlaunched`: kernels for which Triton must build a launcher where they run.
    """

    kernels: list[str] = field(default_factory=list)
    untimed: list[str] = field(default_factory=list)
    unlaunched: list[str] = field(default_factory=list)

    def note(self, name: str, configs: int) -> None:
        """Record a kernel and the number of its configurations, 0 if it was found in a cache."""
        self.kernels.append(name)
        self.untimed += [name] * (configs > 1)


@contextlib.contextmanager
def device(target: Target) -> Iterator[CompiledKernels]:
    """Describe `target` as `cuda:0` of this process, which then compiles in this thread alone.

    Raises:
        TargetError: the target is not a GPU of NVIDIA or AMD.
        DeviceError: torch sees a real GPU.
        CompilerNotFoundError: the device guard below torch cannot be built.
    """
    if target.kind not in ("cuda", "hip"):
        raise TargetError(
            "a GPU of NVIDIA or AMD", str(target), "Others are compiled where they are."
        )
    if torch.cuda.is_available():
        advice = "Hide it: CUDA_VISIBLE_DEVICES= (empty), before torch is imported."
        raise DeviceError("a process that sees no GPU", torch.cuda.get_device_name(), advice)
    guard = guard_of(SOURCE)
    for name in FIRST:
        importlib.import_module(name)
    interfaces = importlib.import_module("torch._dynamo.device_interface")
    interfaces.get_interface_for_device("cuda")  # registers all of them, as torch finds them
    compiled, properties = CompiledKernels(), _properties(target)
    with Changes() as changes:
        changes.callback(forget_answers)
        prefers = int(compat.prefers_cudnn_attention(int(properties.major)))
        guard.ipex_describe(int(properties.major), prefers)
        changes.callback(guard.ipex_forget)
        _describe_cuda(changes, properties, target)
        describe_to_dynamo(changes, interfaces.CudaInterface, "cuda", properties)
        describe_to_fake_tensors(changes)
        describe_to_passes(changes)
        _describe_to_inductor(changes, compiled)
        _describe_to_triton(changes, target)
        changes.set(cuda, Kernel=_Unloaded)
        forget_answers()
        with compat.compiles_in_this_process():
            yield compiled


class _Unloaded:
    """A stand-in for a kernel of this package that the driver would load."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry


def _properties(target: Target) -> SimpleNamespace:
    """Return the values of torch.cuda.get_device_properties for the target."""
    major, minor = (
        (int(target.arch[3:-1]), int(target.arch[-1])) if target.kind == "cuda" else _gfx(target)
    )
    return SimpleNamespace(
        name=target.name,
        major=major,
        minor=minor,
        multi_processor_count=target.multiprocessors,
        total_memory=target.memory or 0,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=target.threads,
        max_threads_per_block=1024,
        warp_size=target.subgroup,
        shared_memory_per_block=49152 if target.kind == "cuda" else target.shared_memory,
        shared_memory_per_block_optin=target.shared_memory,
        shared_memory_per_multiprocessor=(target.shared_memory or 0) + 1024,
        gcnArchName=target.arch if target.kind == "hip" else "",
        is_integrated=0,
    )


def _gfx(target: Target) -> tuple[int, int]:
    """Return major and minor version of an AMD architecture."""
    return int(target.arch[3:-2]), int(target.arch[-2], 16)  # gfx942 is 9.4, stepping 2


def _describe_cuda(changes: Changes, properties: SimpleNamespace, target: Target) -> None:
    """Have the functions of torch.cuda describe the target."""
    capability, memory = (properties.major, properties.minor), properties.total_memory
    answers: dict[str, Any] = {
        "is_available": True,
        "_is_compiled": True,
        "device_count": 1,
        "current_device": INDEX,
        "get_device_properties": properties,
        "get_device_capability": capability,
        "get_device_name": properties.name,
        "is_bf16_supported": True,
        "is_tf32_supported": target.kind == "cuda",
        "mem_get_info": (memory, memory),
        "memory_allocated": 0,
        "synchronize": None,
        "set_device": None,
        "_exchange_device": INDEX,
        "_maybe_exchange_device": INDEX,
        "_lazy_init": None,
        "set_rng_state": None,
        "is_current_stream_capturing": False,
        "current_stream": SimpleNamespace(query=always(True), cuda_stream=0),
    }
    changes.set(torch.cuda, **{name: always(answer) for name, answer in answers.items()})
    changes.set(torch.cuda, get_rng_state=lambda *_, **__: torch.zeros(16, dtype=torch.uint8))
    changes.set(torch._C, _cuda_getCurrentRawStream=always(0))
    present, absent = ("cuda", "hip") if target.kind == "cuda" else ("hip", "cuda")
    version: Any = torch.version
    changes.set(
        version, **{present: getattr(version, present) or compat.TOOLKITS[present], absent: None}
    )


def _describe_to_inductor(changes: Changes, compiled: CompiledKernels) -> None:
    """Have Inductor compile Triton kernels without loading them, and record them."""
    from torch._inductor.runtime.triton_heuristics import (
        CachingAutotuner,
        StaticTritonCompileResult,
    )
    from torch._inductor.triton_bundler import TritonBundler

    launchable: Any = StaticTritonCompileResult.can_statically_launch

    def precompile(
        self: Any,
        warm_cache_only: bool = False,
        reload_kernel: Any = None,
        static_triton_bundle_key: str | None = None,
    ) -> None:
        """Compile the kernel, and stop where it would be loaded."""
        self._reload_kernel = reload_kernel
        compiled.note(self.fn.__name__, _compile_first(self))
        # A loading process must not compile a variant because of the registers the kernel takes.
        self.inductor_meta["dynamic_scale_rblock"] = False
        if not self.is_statically_launchable():
            compiled.unlaunched.append(self.fn.__name__)
        elif static_triton_bundle_key is not None:
            TritonBundler.put_static_autotuner(static_triton_bundle_key, self)

    def can_statically_launch(kernel: Any, *arguments: Any) -> Any:
        _name_whole(kernel)
        return launchable(kernel, *arguments)

    static = staticmethod(can_statically_launch)
    changes.set(StaticTritonCompileResult, can_statically_launch=static)
    changes.set(CachingAutotuner, precompile=precompile)


def _name_whole(kernel: Any) -> None:
    """Store a binary under its kernel's full name, even if that is long.

    Triton cuts the names of its files at 150 characters; the launcher looks for full ones.
    """
    from torch._inductor.runtime.cache_dir_utils import triton_cache_dir
    from torch._inductor.runtime.runtime_utils import triton_hash_to_path_key

    folder = Path(triton_cache_dir(INDEX), triton_hash_to_path_key(kernel.hash))
    for kind in BINARIES.values():
        whole = folder / f"{kernel.src.fn.__name__}.{kind}"
        if kind in kernel.asm and len(whole.name) <= LONGEST and not whole.exists():
            whole.write_bytes(kernel.asm[kind])


def _compile_first(kernel: Any) -> int:
    """Compile one configuration, so that none is timed at run time; return how many there were.

    Inductor lists first the configuration it would use if it had only one. If that one does not
    compile (it needs more memory than the GPU has), the next one is used.
    """
    from torch._inductor.runtime.triton_heuristics import NoTritonConfigsError

    configs = list(kernel.configs or ())
    for config in configs[:-1]:
        kernel.configs = [config]
        with contextlib.suppress(NoTritonConfigsError):
            kernel._precompile_worker()
            return len(configs)
    kernel.configs = configs[-1:]
    kernel._precompile_worker()
    return len(configs)


def _describe_to_triton(changes: Changes, target: Target) -> None:
    """Replace Triton's driver by one that describes the target."""
    from torch._inductor.runtime import triton_helpers
    from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]
    from triton.runtime import driver  # type: ignore[import-untyped]

    arch = int(target.arch[3:]) if target.kind == "cuda" else target.arch
    stub = SimpleNamespace(
        get_current_target=always(GPUTarget(target.kind, arch, target.subgroup or 32)),
        get_current_device=always(INDEX),
        get_current_stream=always(0),
        set_current_device=always(None),
        get_device_interface=always(torch.cuda),
        get_active_torch_device=always(torch.device("cuda", INDEX)),
        is_active=always(True),
    )
    changes.set(triton_helpers, set_driver_to_gpu=always(None))
    changes.set(driver, _active=stub)
