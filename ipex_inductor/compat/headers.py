"""Precompiled headers for Inductor's C++ kernels."""

import contextlib
import functools
import logging
import os
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HEADER = "torch/csrc/inductor/cpp_prefix.h"
# Defined by Inductor's setting for headers of its own, which is off for graphs of ours.
OWN = "-D TORCH_INDUCTOR_PRECOMPILE_HEADERS "
Find = Callable[[str, str], Path | None]  # from the path of a kernel's library, and its command
log = logging.getLogger("ipex_inductor")


def kernel_command(isa: Any) -> str:
    """Return the command that compiles kernels with the vectors `isa`, without its files."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache
    from torch._inductor.cpp_builder import CppBuilder, CppTorchDeviceOptions

    options = CppTorchDeviceOptions(
        vec_isa=isa,
        device_type="cpu",
        extra_flags=(),
        use_relative_path=False,
        min_optimize=False,
        **CppPythonBindingsCodeCache.cpp_compile_command_flags,
    )
    kernel = CppBuilder(name="kernel", sources="kernel.cpp", BuildOption=options)
    return _command(kernel).replace(OWN, "")


@functools.cache
def use_headers(find: Find) -> None:
    """Compile each kernel of this process with the header that `find` returns for it.

    Kernels with a header of Inductor's own, or in two sources, are compiled as before.
    """
    from torch._inductor import codecache
    from torch._inductor.exc import CppCompileError

    usual = codecache._worker_compile_cpp

    def compile_cpp(lock_path: str, cpp_builders: Sequence[Any]) -> None:
        header = _header(find, *cpp_builders) if len(cpp_builders) == 1 else None
        if header is None:
            usual(lock_path, cpp_builders)
            return
        builder = cpp_builders[0]
        without = builder._include_dirs_args
        builder._include_dirs_args = f"-include {shlex.quote(str(header))} {without}"
        try:
            usual(lock_path, cpp_builders)
        except CppCompileError as error:
            log.info("a kernel is compiled without the precompiled header: %s", error)
            builder._include_dirs_args = without
            usual(lock_path, cpp_builders)

    codecache._worker_compile_cpp = compile_cpp


def _header(find: Find, builder: Any) -> Path | None:
    """Return the header that `find` has for a kernel that is not compiled yet and includes it."""
    from torch._inductor.cpp_builder import is_gcc

    if not is_gcc():  # Clang refuses a header that is older than a file that it was made of.
        return None
    target = builder.get_target_file_path()
    if os.path.exists(target) or "-include " in builder._include_dirs_args:
        return None
    with contextlib.suppress(OSError):
        if f"#include <{HEADER}>" in Path(builder._sources_args.strip()).read_text():
            return find(target, _command(builder))
    return None


def _command(builder: Any) -> str:
    """Return the part of the command that a kernel and its precompiled header must share."""
    parts = (
        builder._compiler,
        builder._definitions_args,
        builder._cflags_args,
        builder._include_dirs_args,
        builder._passthrough_parameters_args,
    )
    # Flags for the linker alone are left out: a header is not linked.
    return " ".join(flag for flag in " ".join(parts).split() if flag != "-shared")
