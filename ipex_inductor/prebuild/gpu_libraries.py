"""AOTInductor's libraries for a GPU that is not here, which hold the kernels' binaries."""

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
from ipex_inductor.prebuild.described import Made, device
from ipex_inductor.target.device import Target

HOST = "march=x86-64-v2"  # of what a package does on the host, which is no loop


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
