"""shim.cpp as a library: built on first use by g++ against the wheels here, or from the cache."""

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
    """SYCL in this process. Raises `SyclAbsentError`; what failed once is not tried again."""
    return _loaded()[0]


def written(folder: str | Path) -> Path:
    """The library as a file in that folder, which is the caller's alone.

    Raises `SyclAbsentError`.
    """
    return _file(folder, _loaded()[1])


def shipped() -> tuple[Key, Entry]:
    """It for others, whatever their compiler is. Raises `SyclAbsentError`."""
    return key_of(wheels.runtime()), Entry({"flags": [*FLAGS]}, _loaded()[1])


def key_of(here: Runtime) -> Key:
    """What it is kept under: each version of SYCL has its own."""
    return Key(
        kind=KIND,
        source=source_digest(),
        tables=(),
        options=pairs({"flags": " ".join(FLAGS)}),
        problem=pairs({"sycl": here.named}),
        architecture=platform.machine(),
        toolkit=pairs({"c++": toolkit.compiler_named()}),
        triton="",
        torch="",
        environment=tuple(pair for pair in environment() if pair[0] in READ),
    )


def _loaded() -> tuple[Shim, bytes]:
    with _lock:
        found = _shim()
    if isinstance(found, SyclAbsentError):
        raise found
    return found


@functools.cache
def _shim() -> tuple[Shim, bytes] | SyclAbsentError:
    said = ""
    try:
        here = wheels.runtime()
        wheels.check_process(here)
        for blob in _blobs(here):
            with tempfile.TemporaryDirectory() as folder:
                try:
                    return Shim(here.library, _file(folder, blob), here.cpu), blob
                except (ShimError, OSError) as error:
                    said = str(error)
    except SyclAbsentError as error:
        return error
    todo = f"pip install --force-reinstall {wheels.RUNTIME}=={here.version}"
    return SyclAbsentError(f"{here.named} to load", said, todo)


def _file(folder: str | Path, blob: bytes) -> Path:
    file = Path(folder, "shim.so")
    file.write_bytes(blob)
    return file


def _blobs(here: Runtime) -> Iterator[bytes]:
    """What caches and bundles have, by whatever compiler; where none of it loads, by that here."""
    compiler, key = toolkit.compiler(), key_of(here)
    none = True
    for entry in kernels.by_any_compiler(key):
        none = False
        yield entry.blob
    if compiler is not None:
        yield kernels.kernel(key, functools.partial(_built, here, compiler)).blob
    elif none:
        todo = "`apt-get install g++`, or set CXX: it is needed once."
        raise SyclAbsentError("a C++ compiler, as no cache has SYCL's functions", "none", todo)


def _built(here: Runtime, compiler: str) -> tuple[dict[str, Any], bytes]:
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "shim.so")
        command = [
            *(compiler, *FLAGS, str(Path(__file__).with_name("shim.cpp")), "-o", str(library)),
            *(f"-I{here.include}", f"-L{here.library.parent}", f"-l:{here.soname}", "-ldl"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        if done.returncode:
            said = next((x for x in done.stderr.splitlines() if "error" in x), "no message")
            todo = f"`ipex-inductor doctor` says what is missing; the headers are {here.include}."
            came = f"{compiler} failed: {said}"
            raise SyclAbsentError(f"C++ against {here.named}", came, todo, done.stderr)
        return {"flags": list(FLAGS)}, library.read_bytes()
