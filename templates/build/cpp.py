"""C++ templates compiled and loaded: from the kernel cache if it has them, else by the compiler.

A library is verified just before it is loaded, from memory that no other process can reach: the
loader opens no file on a disk.
"""

import contextlib
import ctypes
import fcntl
import functools
import itertools
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from ipex_inductor import compat
from ipex_inductor.aot_cache import kernels, toolkit
from ipex_inductor.aot_cache.digest import source_digest
from ipex_inductor.aot_cache.entry import Entry
from ipex_inductor.aot_cache.env_fingerprint import environment
from ipex_inductor.aot_cache.key import Key, Pairs, pairs
from ipex_inductor.target.device import architecture
from ipex_inductor.target.x86_levels import LEVELS

T = TypeVar("T")
KIND = "cpp"
FLAGS = ("-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fopenmp")
LINKED = ("-shared", "-fPIC")
# A kernel runs on any CPU of its architecture, so no flag may depend on this machine.
WIDE = {"x86-64-v4": ("-mprefer-vector-width=512",)}
# Variables that change the compiler's output; `toolkit` says which compiler it is.
READ = frozenset(
    {"CPATH", "CPLUS_INCLUDE_PATH", "GCC_EXEC_PREFIX", "COMPILER_PATH", "LIBRARY_PATH"}
)
SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK


class NotBuiltError(RuntimeError):
    """A kernel that the cache does not have and the compiler did not make; the text says why."""


def require_found(found: T | str) -> T:
    """Return `found`, or raise `NotBuiltError` with the reason if it is a string.

    Callers remember reasons, as repeating a failure would cost as much at every step.
    """
    if isinstance(found, str):
        raise NotBuiltError(found)
    return found


def load(
    source: Callable[[], str], problem: Pairs, with_torch: bool = False, portable: bool = False
) -> ctypes.CDLL:
    """Return a library for this CPU, compiled or from the cache. Raises `NotBuiltError`.

    Args:
        source: returns the C++ source; called only to compile it.
        problem: names the library in the cache.
        with_torch: it uses torch's own C++, and so fits this torch alone.
        portable: it computes nothing, so one for any CPU of this kind, by any compiler, will do.
    """
    compiler, key = toolkit.compiler(), key_of(problem, with_torch, portable)
    try:
        if compiler is None:
            return _open_first(kernels.by_any_compiler(key))
        with contextlib.suppress(OSError, NotBuiltError):
            if portable:
                return _open_first(kernels.by_any_compiler(key))
            return _open_first(kernels.either(key, _shipping_key(key)))
        build = functools.partial(_compile_library, source, compiler, with_torch, _arch(portable))
        return _open_library(kernels.kernel(key, build).blob)
    except OSError as error:  # no disk space for the compiler, or a missing library
        raise NotBuiltError(f"a C++ kernel is not to be had: {error}") from error


def ship(source: Callable[[], str], problem: Pairs, with_torch: bool = False) -> None:
    """Store a library for others in the cache, for the target CPU, without loading it.

    They may use it with any compiler, if they have none by their own. Raises `NotBuiltError`.
    """
    compiler, key = toolkit.compiler(), _shipping_key(key_of(problem, with_torch))
    if compiler is None:
        raise NotBuiltError("no C++ compiler was found")
    kernels.kernel(key, lambda: _compile_library(source, compiler, with_torch, architecture()))


def _shipping_key(key: Key) -> Key:
    return replace(key, toolkit=pairs({"c++": "any"}), environment=())


def key_of(problem: Pairs, with_torch: bool = False, portable: bool = False) -> Key:
    """Return the cache key of a kernel; `problem` and our sources determine its C++ source."""
    arch = _arch(portable)
    read = () if portable else READ
    return Key(
        kind=KIND,
        source=source_digest(),
        tables=(),
        options=pairs({"flags": " ".join(_flags(arch))}),
        problem=problem,
        architecture=_level(arch)[0],
        toolkit=pairs({"c++": toolkit.compiler_identity()}),
        triton="",
        torch=compat.VERSION if with_torch else "",  # else nothing of torch is compiled in
        environment=tuple(pair for pair in environment() if pair[0] in read),
    )


def _arch(portable: bool) -> str:
    arch = architecture()
    return arch.partition(":")[0] if portable else arch


def _flags(arch: str) -> tuple[str, ...]:
    return (*FLAGS, *_level(arch)[1], *LINKED)


def _level(arch: str) -> tuple[str, tuple[str, ...]]:
    """Return the CPU level that an architecture's kernels are built for, and its flags."""
    if arch not in LEVELS:
        return arch, ()
    march = LEVELS[arch].march
    return march, (f"-march={march}", *WIDE.get(march, ()))


def _compile_library(
    source: Callable[[], str], compiler: str, with_torch: bool, arch: str
) -> tuple[dict[str, Any], bytes]:
    """Return the entry's metadata, and the compiled library as bytes."""
    flags = _flags(arch)
    with tempfile.TemporaryDirectory() as folder:
        source_file, library = Path(folder, "kernel.cpp"), Path(folder, "kernel.so")
        source_file.write_text(source())
        torch_flags = compat.cxx_flags() if with_torch else ()
        command = [compiler, *flags, "-o", str(library), str(source_file), *torch_flags]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        if done.returncode:
            raise NotBuiltError(f"{compiler} failed: {done.stderr.strip()[:2000]}")
        return {"flags": list(flags)}, library.read_bytes()


def why_not_taken(source: str, arch: str) -> str | None:
    """Return why the compiler refuses a source for an architecture, None if it accepts it."""
    compiler = toolkit.compiler()
    if compiler is None:
        return "no C++ compiler was found"
    command = [compiler, *_flags(arch), "-fsyntax-only", "-x", "c++", "-"]
    try:
        done = subprocess.run(
            command, input=source, capture_output=True, text=True, errors="replace"
        )
    except OSError as error:
        return f"{compiler} does not run: {error}"
    return f"{compiler}: {done.stderr.strip()[:500]}" if done.returncode else None


def _open_first(entries: Iterable[Entry]) -> ctypes.CDLL:
    """Return the first library that the loader accepts; raise the last one's error if none."""
    failed: OSError | None = None
    for entry in entries:
        try:
            return _open_library(entry.blob)
        except OSError as error:  # by a compiler whose run-time library is not here
            failed = error
    raise failed or NotBuiltError("no C++ compiler was found, and no cache has the kernel")


_loads = itertools.count()


def _open_library(blob: bytes) -> ctypes.CDLL:
    """Return the library in `blob`, loaded by a name that was never used before.

    The loader identifies libraries by their names first.
    """
    fd = os.memfd_create("ipex_kernel", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(fd, "wb") as memory:
        memory.write(blob)
        memory.flush()
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        return ctypes.CDLL(f"/proc/self/fd/{'./' * next(_loads)}{fd}")
