"""C++ templates compiled and loaded: from the kernel cache where it has them, else by the compiler.

What is loaded was verified a moment before and lies in memory that nobody else can reach: no file
on a disk is opened by the loader.
"""

import ctypes
import functools
import logging
import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ipex_inductor.aot_cache import kernels, toolkit
from ipex_inductor.aot_cache.digest import source_digest
from ipex_inductor.aot_cache.key import Key, Pairs, pairs
from ipex_inductor.aot_cache.knobs import environment
from ipex_inductor.target import current

log = logging.getLogger("ipex_inductor")

KIND = "cpp"
FLAGS = ("-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fopenmp")
LINKED = ("-shared", "-fPIC")
# A kernel runs on whatever CPU has its architecture, so nothing of this machine alone may enter.
LEVELS = {
    "avx512": ("-march=x86-64-v4", "-mprefer-vector-width=512"),
    "avx512_bf16": ("-march=x86-64-v4", "-mprefer-vector-width=512"),
    "amx": ("-march=x86-64-v4", "-mprefer-vector-width=512"),
    "avx2": ("-march=x86-64-v3",),
}


class NotBuiltError(RuntimeError):
    """A kernel that the cache does not have and the compiler did not make; the text says why."""


def load(source: Callable[[], str], problem: Pairs) -> ctypes.CDLL:
    """A library for the CPU here; `problem` names it in the cache's words.

    `source` is asked for if it must be compiled. Raises `NotBuiltError`.
    """
    compiler = toolkit.compiler()
    build = functools.partial(_built, source, compiler) if compiler else None
    try:
        entry = kernels.kernel(key_of(problem), build)
        if entry is None:
            raise NotBuiltError("no C++ compiler is here, and no cache has the kernel")
        return _opened(entry.blob)
    except OSError as error:  # no room for the compiler, or a loader that misses a library
        raise NotBuiltError(f"a C++ kernel is not to be had: {error}") from error


def key_of(problem: Pairs) -> Key:
    """What a kernel's entry is found by: the source follows from ours and from `problem`."""
    arch = current().arch
    return Key(
        kind=KIND,
        source=source_digest(),
        tables=(),
        options=pairs({"flags": " ".join(_flags(arch))}),
        problem=problem,
        architecture=arch,
        toolkit=pairs({"c++": toolkit.compiler_named()}),
        triton="",
        torch="",  # nothing of torch is compiled in
        environment=tuple(pair for pair in environment() if pair[0] != "CXX"),  # see toolkit
    )


def _flags(arch: str) -> tuple[str, ...]:
    return (*FLAGS, *LEVELS.get(arch.partition(":")[2], ()), *LINKED)


def _built(source: Callable[[], str], compiler: str) -> tuple[dict[str, Any], bytes]:
    """What the entry says of it, and the library as bytes."""
    flags = _flags(current().arch)
    with tempfile.TemporaryDirectory() as folder:
        written, library = Path(folder, "kernel.cpp"), Path(folder, "kernel.so")
        written.write_text(source())
        command = [compiler, *flags, "-o", str(library), str(written)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise NotBuiltError(f"{compiler} failed: {done.stderr.strip()[:2000]}")
        return {"flags": list(flags)}, library.read_bytes()


def _opened(blob: bytes) -> ctypes.CDLL:
    """The descriptor stays open: by its number the loader knows libraries apart."""
    fd = os.memfd_create("ipex_kernel", os.MFD_CLOEXEC)
    with open(fd, "wb", closefd=False) as memory:
        memory.write(blob)
    return ctypes.CDLL(f"/proc/self/fd/{fd}")
