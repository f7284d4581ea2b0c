"""shim.cpp as a library: built on first use by g++ against the installed wheels, or cached."""

import functools
import platform
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ipex_inductor.aot_cache import kernels, toolkit
from ipex_inductor.aot_cache.digest import source_digest
from ipex_inductor.aot_cache.entry import Entry
from ipex_inductor.aot_cache.env_fingerprint import environment
from ipex_inductor.aot_cache.key import Key, pairs
from ipex_inductor.errors import SyclAbsentError
from ipex_inductor.templates.build.cpp import READ
from ipex_inductor.templates.sycl import wheels
from ipex_inductor.templates.sycl.binding import Shim, ShimError
from ipex_inductor.templates.sycl.wheels import Runtime

KIND = "sycl-shim"
FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-w")

_lock = threading.Lock()


def shim() -> Shim:
    """Return this process's SYCL. Raises `SyclAbsentError`; a failure is not tried again."""
    return _load_shim()[0]


def write_library(folder: str | Path) -> Path:
    """Write the library to a folder that the caller alone uses, and return its path.

    Raises `SyclAbsentError`.
    """
    return _file(folder, _load_shim()[1])


def cache_entry() -> tuple[Key, Entry]:
    """Return the library's cache key and entry for a bundle. Raises `SyclAbsentError`."""
    return key_of(wheels.runtime()), Entry({"flags": [*FLAGS]}, _load_shim()[1])


def key_of(runtime: Runtime) -> Key:
    """Return the cache key of the library, which differs by version of SYCL."""
    return Key(
        kind=KIND,
        source=source_digest(),
        tables=(),
        options=pairs({"flags": " ".join(FLAGS)}),
        problem=pairs({"sycl": runtime.key_name}),
        architecture=platform.machine(),
        toolkit=pairs({"c++": toolkit.compiler_identity()}),
        triton="",
        torch="",
        environment=tuple(pair for pair in environment() if pair[0] in READ),
    )


def _load_shim() -> tuple[Shim, bytes]:
    with _lock:
        result = _shim()
    if isinstance(result, SyclAbsentError):
        raise result
    return result


@functools.cache
def _shim() -> tuple[Shim, bytes] | SyclAbsentError:
    message = ""
    try:
        runtime = wheels.runtime()
        wheels.check_process(runtime)
        for blob in _blobs(runtime):
            with tempfile.TemporaryDirectory() as folder:
                try:
                    return Shim(runtime.library, _file(folder, blob), runtime.cpu), blob
                except (ShimError, OSError) as error:
                    message = str(error)
    except SyclAbsentError as error:
        return error
    remedy = f"pip install --force-reinstall {wheels.RUNTIME}=={runtime.version}"
    return SyclAbsentError(f"{runtime.key_name} to load", message, remedy)


def _file(folder: str | Path, blob: bytes) -> Path:
    file = Path(folder, "shim.so")
    file.write_bytes(blob)
    return file


def _blobs(runtime: Runtime) -> Iterator[bytes]:
    """Yield the cached libraries by any compiler, then one built by this machine's compiler.

    Raises `SyclAbsentError` if there is neither.
    """
    compiler, key = toolkit.compiler(), key_of(runtime)
    is_absent = True
    for entry in kernels.by_any_compiler(key):
        is_absent = False
        yield entry.blob
    if compiler is not None:
        yield kernels.kernel(key, functools.partial(_build_library, runtime, compiler)).blob
    elif is_absent:
        remedy = "`apt-get install g++`, or set CXX: it is needed once."
        raise SyclAbsentError("a C++ compiler, as no cache has SYCL's functions", "none", remedy)


def _build_library(runtime: Runtime, compiler: str) -> tuple[dict[str, Any], bytes]:
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "shim.so")
        command = [
            *(compiler, *FLAGS, str(Path(__file__).with_name("shim.cpp")), "-o", str(library)),
            *(
                f"-I{runtime.include}",
                f"-L{runtime.library.parent}",
                f"-l:{runtime.soname}",
                "-ldl",
            ),
        ]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        if done.returncode:
            message = next((x for x in done.stderr.splitlines() if "error" in x), "no message")
            remedy = (
                f"`ipex-inductor doctor` says what is missing; the headers are {runtime.include}."
            )
            failure = f"{compiler} failed: {message}"
            raise SyclAbsentError(f"C++ against {runtime.key_name}", failure, remedy, done.stderr)
        return {"flags": list(FLAGS)}, library.read_bytes()
