"""C++ templates compiled and loaded: from the kernel cache where it has them, else by the compiler.

What is loaded was verified a moment before and lies in memory that nobody else can reach: no file
on a disk is opened by the loader.
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
# A kernel runs on whatever CPU has its architecture, so nothing of this machine alone may enter.
WIDE = {"x86-64-v4": ("-mprefer-vector-width=512",)}
# Variables that change what the compiler makes of a source; `toolkit` says which compiler.
READ = frozenset(
    {"CPATH", "CPLUS_INCLUDE_PATH", "GCC_EXEC_PREFIX", "COMPILER_PATH", "LIBRARY_PATH"}
)
SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK


class NotBuiltError(RuntimeError):
    """A kernel that the cache does not have and the compiler did not make; the text says why."""


def given(found: T | str) -> T:
    """What was found; raises `NotBuiltError` with the reason that is there instead.

    Reasons are what callers remember: what failed once would cost every step as much.
    """
    if isinstance(found, str):
        raise NotBuiltError(found)
    return found


def load(
    source: Callable[[], str], problem: Pairs, with_torch: bool = False, portable: bool = False
) -> ctypes.CDLL:
    """A library for the CPU here; `problem` names it in the cache's words.

    `source` is asked for if it must be compiled. `with_torch`: it uses torch's own C++, and so fits
    this torch alone. `portable`: it computes nothing, so that one for any CPU of this kind, by any
    compiler, is as good. Raises `NotBuiltError`.
    """
    compiler, key = toolkit.compiler(), key_of(problem, with_torch, portable)
    try:
        if compiler is None:
            return _opened_of(kernels.by_any_compiler(key))
        with contextlib.suppress(OSError, NotBuiltError):
            if portable:
                return _opened_of(kernels.by_any_compiler(key))
            return _opened_of(kernels.either(key, _shipped(key)))
        build = functools.partial(_built, source, compiler, with_torch, _arch(portable))
        return _opened(kernels.kernel(key, build).blob)
    except OSError as error:  # no room for the compiler, or a loader that misses a library
        raise NotBuiltError(f"a C++ kernel is not to be had: {error}") from error


def ship(source: Callable[[], str], problem: Pairs, with_torch: bool = False) -> None:
    """Have a library for others in the cache, for the CPU that is described: nothing is loaded.

    Whatever their compiler is, where they have none by their own. Raises `NotBuiltError`.
    """
    compiler, key = toolkit.compiler(), _shipped(key_of(problem, with_torch))
    if compiler is None:
        raise NotBuiltError("no C++ compiler is here")
    kernels.kernel(key, lambda: _built(source, compiler, with_torch, architecture()))


def _shipped(key: Key) -> Key:
    return replace(key, toolkit=pairs({"c++": "any"}), environment=())


def key_of(problem: Pairs, with_torch: bool = False, portable: bool = False) -> Key:
    """What a kernel's entry is found by: the source follows from ours and from `problem`."""
    arch = _arch(portable)
    read = () if portable else READ
    return Key(
        kind=KIND,
        source=source_digest(),
        tables=(),
        options=pairs({"flags": " ".join(_flags(arch))}),
        problem=problem,
        architecture=_level(arch)[0],
        toolkit=pairs({"c++": toolkit.compiler_named()}),
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
    """What a kernel for that architecture is built for, and the flags that say so."""
    if arch not in LEVELS:
        return arch, ()
    march = LEVELS[arch].march
    return march, (f"-march={march}", *WIDE.get(march, ()))


def _built(
    source: Callable[[], str], compiler: str, with_torch: bool, arch: str
) -> tuple[dict[str, Any], bytes]:
    """What the entry says of it, and the library as bytes."""
    flags = _flags(arch)
    with tempfile.TemporaryDirectory() as folder:
        written, library = Path(folder, "kernel.cpp"), Path(folder, "kernel.so")
        written.write_text(source())
        torchs = compat.cxx_flags() if with_torch else ()
        command = [compiler, *flags, "-o", str(library), str(written), *torchs]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        if done.returncode:
            raise NotBuiltError(f"{compiler} failed: {done.stderr.strip()[:2000]}")
        return {"flags": list(flags)}, library.read_bytes()


def why_not_taken(source: str, arch: str) -> str | None:
    """Why the compiler does not take a source for CPUs of that architecture, None if it does."""
    compiler = toolkit.compiler()
    if compiler is None:
        return "no C++ compiler is here"
    command = [compiler, *_flags(arch), "-fsyntax-only", "-x", "c++", "-"]
    try:
        done = subprocess.run(
            command, input=source, capture_output=True, text=True, errors="replace"
        )
    except OSError as error:
        return f"{compiler} does not run: {error}"
    return f"{compiler}: {done.stderr.strip()[:500]}" if done.returncode else None


def _opened_of(entries: Iterable[Entry]) -> ctypes.CDLL:
    """The first that the loader here takes; else raises what it said of the last of them."""
    failed: OSError | None = None
    for entry in entries:
        try:
            return _opened(entry.blob)
        except OSError as error:  # by a compiler whose run-time library is not here
            failed = error
    raise failed or NotBuiltError("no C++ compiler is here, and no cache has the kernel")


_loads = itertools.count()


def _opened(blob: bytes) -> ctypes.CDLL:
    """By a name that was never used: the loader knows libraries apart by their names first."""
    fd = os.memfd_create("ipex_kernel", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(fd, "wb") as memory:
        memory.write(blob)
        memory.flush()
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        return ctypes.CDLL(f"/proc/self/fd/{'./' * next(_loads)}{fd}")
