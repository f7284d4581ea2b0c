"""A GPU that is not here, as torch, Inductor and Triton see it while something is compiled for it.

Nothing runs on it: tensors are fake, kernels are compiled and not loaded. All that is changed in
the process for that is changed by `device` and put back at its end.
"""

import contextlib
import functools
import importlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ipex_inductor import compat
from ipex_inductor.aot_cache import toolkit
from ipex_inductor.aot_cache.entry import Entry
from ipex_inductor.aot_cache.key import pairs
from ipex_inductor.errors import CompilerNotFoundError, DeviceError, TargetError
from ipex_inductor.prebuild.changes import Changes, always
from ipex_inductor.target import Target
from ipex_inductor.templates import cpp, cuda
from ipex_inductor.templates.gpu import BINARIES

INDEX = 0  # the only GPU there is
LONGEST = 255  # characters of a file's name
HOST = "march=x86-64-v2"  # of what a package does on the host, which is no loop
SOURCE = Path(__file__).with_name("described.cpp")

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
    "ipex_inductor.lowerings.listed",
    "ipex_inductor.lowerings.step_cuda",
    "ipex_inductor.optim.batches_cuda",
    "ipex_inductor.optim.norms",
    "ipex_inductor.templates.look_cpp",
    "torch._inductor.codecache.CacheBase",
    "torch._inductor.codegen.cuda.cuda_env",
    "torch._inductor.comm_analysis",
    "torch._inductor.runtime.hints.DeviceProperties",
    "torch._inductor.utils",
    "torch.utils._triton",
)


@dataclass
class Made:
    """What was compiled inside `device`: Triton kernels by name.

    `untimed` had several configurations, of which Inductor times all where it can; `unlaunched`
    are those for whose launcher Triton is asked again where they run.
    """

    kernels: list[str] = field(default_factory=list)
    untimed: list[str] = field(default_factory=list)
    unlaunched: list[str] = field(default_factory=list)

    def note(self, name: str, configs: int) -> None:
        """One more kernel, and how many configurations there were; none if it was found."""
        self.kernels.append(name)
        self.untimed += [name] * (configs > 1)


@contextlib.contextmanager
def device(target: Target) -> Iterator[Made]:
    """`cuda:0` is `target` meanwhile, in this process; it compiles in this thread alone.

    Raises `TargetError` for what is no GPU of NVIDIA or AMD, `DeviceError` where torch sees a real
    one, `CompilerNotFoundError` where the guard below torch cannot be built.
    """
    if target.kind not in ("cuda", "hip"):
        raise TargetError(
            "a GPU of NVIDIA or AMD", str(target), "Others are compiled where they are."
        )
    if torch.cuda.is_available():
        todo = "Hide it: CUDA_VISIBLE_DEVICES= (empty), before torch is imported."
        raise DeviceError("a process that sees no GPU", torch.cuda.get_device_name(), todo)
    guard = guard_of(SOURCE)
    for name in FIRST:
        importlib.import_module(name)
    interfaces = importlib.import_module("torch._dynamo.device_interface")
    interfaces.get_interface_for_device("cuda")  # registers all of them, as torch finds them
    made, properties = Made(), _properties(target)
    with Changes() as changes:
        changes.callback(forget_answers)
        prefers = int(compat.prefers_cudnn_attention(int(properties.major)))
        guard.ipex_describe(int(properties.major), prefers)
        changes.callback(guard.ipex_forget)
        _describe_cuda(changes, properties, target)
        describe_to_dynamo(changes, interfaces.CudaInterface, "cuda", properties)
        describe_to_fake_tensors(changes)
        describe_to_passes(changes)
        _describe_to_inductor(changes, made)
        _describe_to_triton(changes, target)
        changes.set(cuda, Kernel=_Unloaded)
        forget_answers()
        with compat.compiles_in_this_process():
            yield made


@contextlib.contextmanager
def packaging(target: Target) -> Iterator[Made]:
    """`device`, in which AOTInductor makes libraries that hold the kernels' binaries.

    Its C++ is compiled with the headers of CUDA that come with Triton, and linked with a driver's
    library that has nothing in it: the real one is there where it is loaded. Raises what `device`
    raises.
    """
    with device(target) as made, Changes() as changes, tempfile.TemporaryDirectory() as folder:
        from torch._inductor import cpp_builder
        from torch._inductor.codegen.wrapper import PythonWrapperCodegen
        from triton.compiler import CompiledKernel  # type: ignore[import-untyped]

        changes.enter_context(_compiling_with(_headers(), str(_empty_driver(Path(folder)))))
        usual = cpp_builder._get_optimization_cflags

        def portable(*args: Any, **kwargs: Any) -> Any:
            flags, linked = usual(*args, **kwargs)
            return [HOST if flag == "march=native" else flag for flag in flags], linked

        changes.set(cpp_builder, _get_optimization_cflags=portable)
        changes.set(CompiledKernel, _init_handles=_unloaded)
        changes.set(PythonWrapperCodegen, generate_and_run_autotune_block=_save_kernels)
        yield made


@contextlib.contextmanager
def _compiling_with(headers: str, libraries: str) -> Iterator[None]:
    """g++ looks there first."""
    before = {"CPATH": os.environ.get("CPATH"), "LIBRARY_PATH": os.environ.get("LIBRARY_PATH")}
    first = {"CPATH": headers, "LIBRARY_PATH": libraries}
    os.environ.update({n: os.pathsep.join(filter(None, (first[n], before[n]))) for n in first})
    try:
        yield
    finally:
        os.environ.pop("CPATH")
        os.environ.pop("LIBRARY_PATH")
        os.environ.update({name: value for name, value in before.items() if value is not None})


def _headers() -> str:
    """CUDA's, of Triton's wheel, and those they include, of NVIDIA's: torch's wheel lacks both."""
    import triton  # type: ignore[import-untyped]
    from torch.utils import cpp_extension

    wheels = importlib.util.find_spec("nvidia")
    places = [*((wheels and wheels.submodule_search_locations) or ()), cpp_extension.CUDA_HOME]
    found = [next(Path(place).rglob("nv/target"), None) for place in places if place]
    core = [path.parents[1] for path in found if path]
    if not core:
        todo = "pip install --no-deps nvidia-cuda-cccl, of the CUDA that torch was built with."
        raise CompilerNotFoundError("CUDA's core headers (nv/target)", "none", todo)
    own = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    return os.pathsep.join(map(str, (own, core[0])))


def _empty_driver(folder: Path) -> Path:
    """A folder with a libcuda.so for the linker."""
    compiler = toolkit.compiler() or "g++"
    named = subprocess.run(
        [compiler, "-print-file-name=libstdc++.so"], capture_output=True, text=True
    ).stdout.strip()
    if not Path(named).is_absolute():  # a second one in torch's process crashes it
        todo = "Install its libstdc++.so (libstdc++-NN-dev)."
        raise CompilerNotFoundError("a compiler that links libstdc++.so", compiler, todo)
    asked = ("-shared", "-x", "c++", "/dev/null", "-Wl,-soname,libcuda.so.1")
    command = [compiler, *asked, "-o", str(folder / "libcuda.so")]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        todo = "`ipex-inductor doctor` checks it."
        raise CompilerNotFoundError("a compiler that links", done.stderr.strip()[:500], todo)
    return folder


def _unloaded(kernel: Any) -> None:
    """In the place of what would load a binary into the GPU."""
    kernel.module, kernel.function, kernel._run = None, 0, always(None)
    kernel.n_regs, kernel.n_spills, kernel.n_max_threads = 0, 0, 1024


def _save_kernels(wrapper: Any) -> None:
    """In the place of timing them: each kernel's first configuration is what the library holds."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    wrapper.kernel_autotune_defs.splice("async_compile.wait(globals())\ndel async_compile")
    scope: dict[str, Any] = {}
    exec(wrapper.kernel_autotune_defs.getvalue(), scope)
    for kernel in scope.values():
        if isinstance(kernel, CachingAutotuner):
            compiled: Any = kernel
            compiled.save_gpu_kernel(0, compiled.compile_results[0].make_launcher())


class _Unloaded:
    """In the place of a kernel of ours that the driver would load."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry


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


def _properties(target: Target) -> SimpleNamespace:
    """What torch.cuda.get_device_properties would say."""
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
    return int(target.arch[3:-2]), int(target.arch[-2], 16)  # gfx942 is 9.4, stepping 2


def _describe_cuda(changes: Changes, properties: SimpleNamespace, target: Target) -> None:
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
    ours, other = ("cuda", "hip") if target.kind == "cuda" else ("hip", "cuda")
    built: Any = torch.version
    changes.set(built, **{ours: getattr(built, ours) or compat.TOOLKITS[ours], other: None})


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


class _OnCpu(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes on the CPU what is to be made on the GPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*map(_moved, args), **{n: _moved(v) for n, v in (kwargs or {}).items()})


def _moved(value: Any) -> Any:
    on_gpu = isinstance(value, torch.device) and value.type in ("cuda", "xpu")
    return torch.device("cpu") if on_gpu else value


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


def _describe_to_inductor(changes: Changes, made: Made) -> None:
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
        """Up to where a kernel would be loaded."""
        self._reload_kernel = reload_kernel
        made.note(self.fn.__name__, _compile_first(self))
        # Whoever loads it shall not compile another one because of the registers it takes.
        self.inductor_meta["dynamic_scale_rblock"] = False
        if not self.is_statically_launchable():
            made.unlaunched.append(self.fn.__name__)
        elif static_triton_bundle_key is not None:
            TritonBundler.put_static_autotuner(static_triton_bundle_key, self)

    def can_statically_launch(kernel: Any, *about: Any) -> Any:
        _name_whole(kernel)
        return launchable(kernel, *about)

    static = staticmethod(can_statically_launch)
    changes.set(StaticTritonCompileResult, can_statically_launch=static)
    changes.set(CachingAutotuner, precompile=precompile)


def _name_whole(kernel: Any) -> None:
    """Have a binary lie under its kernel's name also where that is long.

    Triton cuts the names of its files at 150 characters; the launcher looks for whole ones.
    """
    from torch._inductor.runtime.cache_dir_utils import triton_cache_dir
    from torch._inductor.runtime.runtime_utils import triton_hash_to_path_key

    folder = Path(triton_cache_dir(INDEX), triton_hash_to_path_key(kernel.hash))
    for kind in BINARIES.values():
        whole = folder / f"{kernel.src.fn.__name__}.{kind}"
        if kind in kernel.asm and len(whole.name) <= LONGEST and not whole.exists():
            whole.write_bytes(kernel.asm[kind])


def _compile_first(kernel: Any) -> int:
    """Compile one configuration, so that where it runs none is timed; how many there were.

    Inductor lists first what it would take if it had no more than one. Where that one does not
    compile (it needs more memory than the GPU has) it is the next.
    """
    from torch._inductor.runtime.triton_heuristics import NoTritonConfigsError

    offered = list(kernel.configs or ())
    for config in offered[:-1]:
        kernel.configs = [config]
        with contextlib.suppress(NoTritonConfigsError):
            kernel._precompile_worker()
            return len(offered)
    kernel.configs = offered[-1:]
    kernel._precompile_worker()
    return len(offered)


def _describe_to_triton(changes: Changes, target: Target) -> None:
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
