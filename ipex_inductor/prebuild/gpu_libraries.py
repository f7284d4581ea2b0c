"""AOTInductor libraries for an absent GPU, which hold the kernels' binaries."""

import contextlib
import importlib.util
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ipex_inductor.aot_cache import toolkit
from ipex_inductor.errors import CompilerNotFoundError
from ipex_inductor.prebuild.changes import Changes, always
from ipex_inductor.prebuild.described import CompiledKernels, device
from ipex_inductor.target.device import Target

HOST = "march=x86-64-v2"  # instruction set of a package's host code, which has no loops


@contextlib.contextmanager
def packaging(target: Target) -> Iterator[CompiledKernels]:
    """Enter `device` with AOTInductor building libraries that hold the kernels' binaries.

    Their C++ is compiled with the CUDA headers that come with Triton, and linked with an empty
    driver library: the real one is present where the library is loaded. Raises what `device`
    raises.
    """
    with device(target) as compiled, Changes() as changes, tempfile.TemporaryDirectory() as folder:
        from torch._inductor import cpp_builder
        from torch._inductor.codegen.wrapper import PythonWrapperCodegen
        from triton.compiler import CompiledKernel  # type: ignore[import-untyped]

        changes.enter_context(_compiling_with(_headers(), str(_empty_driver(Path(folder)))))
        usual = cpp_builder._get_optimization_cflags

        def portable(*args: Any, **kwargs: Any) -> Any:
            flags, linked = usual(*args, **kwargs)
            return [HOST if flag == "march=native" else flag for flag in flags], linked

        changes.set(cpp_builder, _get_optimization_cflags=portable)
        changes.set(CompiledKernel, _init_handles=_skip_loading)
        changes.set(PythonWrapperCodegen, generate_and_run_autotune_block=_save_kernels)
        yield compiled


@contextlib.contextmanager
def _compiling_with(headers: str, libraries: str) -> Iterator[None]:
    """Have g++ search these folders first for headers and libraries."""
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
    """Return the include path: CUDA's headers of Triton's wheel, and NVIDIA's core headers.

    torch's wheel lacks both. Raises `CompilerNotFoundError` without the core headers.
    """
    import triton  # type: ignore[import-untyped]
    from torch.utils import cpp_extension

    wheels = importlib.util.find_spec("nvidia")
    folders = [*((wheels and wheels.submodule_search_locations) or ()), cpp_extension.CUDA_HOME]
    matches = [next(Path(folder).rglob("nv/target"), None) for folder in folders if folder]
    core = [path.parents[1] for path in matches if path]
    if not core:
        advice = "pip install --no-deps nvidia-cuda-cccl, of the CUDA that torch was built with."
        raise CompilerNotFoundError("CUDA's core headers (nv/target)", "none", advice)
    include = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    return os.pathsep.join(map(str, (include, core[0])))


def _empty_driver(folder: Path) -> Path:
    """Build an empty libcuda.so for the linker in a folder, and return the folder.

    Raises `CompilerNotFoundError` if the compiler cannot link.
    """
    compiler = toolkit.compiler() or "g++"
    libstdcxx = subprocess.run(
        [compiler, "-print-file-name=libstdc++.so"], capture_output=True, text=True
    ).stdout.strip()
    if not Path(libstdcxx).is_absolute():  # a second libstdc++ in torch's process crashes it
        advice = "Install its libstdc++.so (libstdc++-NN-dev)."
        raise CompilerNotFoundError("a compiler that links libstdc++.so", compiler, advice)
    flags = ("-shared", "-x", "c++", "/dev/null", "-Wl,-soname,libcuda.so.1")
    command = [compiler, *flags, "-o", str(folder / "libcuda.so")]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        advice = "`ipex-inductor doctor` checks it."
        raise CompilerNotFoundError("a compiler that links", done.stderr.strip()[:500], advice)
    return folder


def _skip_loading(kernel: Any) -> None:
    """Set a kernel's handles to placeholders instead of loading a binary into the GPU."""
    kernel.module, kernel.function, kernel._run = None, 0, always(None)
    kernel.n_regs, kernel.n_spills, kernel.n_max_threads = 0, 0, 1024


def _save_kernels(wrapper: Any) -> None:
    """Compile and save kernels without timing: the library holds each one's first configuration."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    wrapper.kernel_autotune_defs.splice("async_compile.wait(globals())\ndel async_compile")
    scope: dict[str, Any] = {}
    exec(wrapper.kernel_autotune_defs.getvalue(), scope)
    for kernel in scope.values():
        if isinstance(kernel, CachingAutotuner):
            compiled: Any = kernel
            compiled.save_gpu_kernel(0, compiled.compile_results[0].make_launcher())
