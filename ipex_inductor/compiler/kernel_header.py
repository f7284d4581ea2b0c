"""The header of Inductor's C++ kernels: precompiled while a graph is traced, and stored.

Each kernel that Python calls is a source of its own. Of the three seconds that g++ takes for one,
two go into the header. Inductor precompiles it in the folder for temporary files after the graph
was lowered; here it is an entry of a separate store, verified like those of the kernel cache.
"""

import gzip
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import threading
from collections import Counter
from concurrent.futures import Future
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import torch

from ipex_inductor import compat
from ipex_inductor.aot_cache import default_store
from ipex_inductor.aot_cache.env_fingerprint import environment
from ipex_inductor.aot_cache.graph_files import workroom
from ipex_inductor.aot_cache.key import Key, pairs
from ipex_inductor.aot_cache.toolkit import compiler_identity
from ipex_inductor.target.device import architecture, instructions

KIND = "kernel header"
# Precompiling takes as long as parsing the header in four kernels (6.4 and 1.8 s with g++ 12).
DUE = 4  # kernels compiled without the header before it is precompiled
MANY = 10  # calls of a Dynamo graph with more than `DUE` kernels, forward and backward
LEVEL = 1  # of gzip: 150 MB become 25 MB in 1.3 s; level 3: 23 MB in 1.6 s
log = logging.getLogger("ipex_inductor")

_lock = threading.Lock()
_begun: dict[str, "Future[Path | None]"] = {}  # keyed by the command that compiles kernels
_kernels: Counter[str] = Counter()  # kernels compiled without a header, by command


def pays(gm: torch.fx.GraphModule) -> bool:
    """Return True if a training graph has enough kernels for precompiling the header to pay."""
    return sum(bool(node.op.startswith("call_")) for node in gm.graph.nodes) >= MANY


def use() -> None:
    """Compile kernels of this backend's graphs with the precompiled header in this process."""
    compat.use_headers(_find)


def begin(isa: Any) -> None:
    """Start precompiling the header for kernels with vector ISA `isa`, in another thread."""
    command = compat.kernel_command(isa)
    with _lock:
        _begin(command)


def _find(target: str, command: str) -> Path | None:
    """Return the header for the kernel `target` that `command` compiles, after waiting for it.

    None for a kernel of another backend, and for the first `DUE` kernels if no header was begun.
    """
    if not Path(target).is_relative_to(workroom.room()):
        return None
    with _lock:
        if command not in _begun:
            _kernels[command] += 1
            if _kernels[command] <= DUE:
                return None
        future = _begin(command)
    path = future.result()
    return path if path and path.exists() else None


def _begin(command: str) -> "Future[Path | None]":
    if command not in _begun:
        _begun[command] = Future()
        threading.Thread(
            target=_make, args=(command, _begun[command]), name="ipex kernel header", daemon=True
        ).start()
    return _begun[command]


def _make(command: str, future: "Future[Path | None]") -> None:
    try:
        _make_in(workroom.room() / "headers", command, future)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        detail = error.stderr if isinstance(error, subprocess.CalledProcessError) else error
        log.info("kernels are compiled without a precompiled header: %s", detail)
    finally:
        if not future.done():
            future.set_result(None)


def _make_in(folder: Path, command: str, future: "Future[Path | None]") -> None:
    """Put the header into `folder`, from the store or built, and set its path on `future`."""
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"{hashlib.sha256(command.encode()).hexdigest()[:16]}.h"
    path.write_text(f"#include <{compat.HEADER}>\n")
    built = path.with_suffix(".h.gch")

    def build() -> tuple[dict[str, Any], bytes]:
        _run(command, "-x", "c++-header", str(path), "-o", str(built))
        future.set_result(path)  # before it is stored
        return {}, _compress(built)

    store = default_store.headers()
    if store is None:
        build()
        return
    entry = store.compile_once(_key(path, command), build)
    if not future.done():
        _unpack(entry.blob, built)
        future.set_result(path)


def _key(path: Path, command: str) -> Key:
    """Return the key of the header: its preprocessed text, as torch and the system define it."""
    text = _run(command, "-E", "-P", "-x", "c++", str(path), "-o", "-")
    return Key(
        kind=KIND,
        source="",  # no source of this package
        tables=(),
        options=pairs({"command": command}),
        problem=pairs({"text": hashlib.sha256(text).hexdigest()}),
        architecture=architecture(),
        toolkit=pairs({"c++": compiler_identity(), "cpu": instructions()}),
        triton="",
        torch=compat.VERSION,
        environment=environment(),
    )


def _run(command: str, *more: str) -> bytes:
    run = subprocess.run([*shlex.split(command), *more], capture_output=True, check=True)
    return run.stdout


def _compress(path: Path) -> bytes:
    blob = BytesIO()
    with (
        path.open("rb") as file,
        gzip.GzipFile(fileobj=blob, mode="wb", compresslevel=LEVEL, mtime=0) as packed,
    ):
        shutil.copyfileobj(file, packed)
    return blob.getvalue()


def _unpack(blob: bytes, path: Path) -> None:
    try:
        with gzip.GzipFile(fileobj=BytesIO(blob)) as packed, path.open("wb") as file:
            shutil.copyfileobj(packed, file)
    except OSError:
        with suppress(OSError):
            path.unlink()  # or g++ would read a truncated header
        raise


def _renew() -> None:
    """Forget what the parent process began: a child has neither its thread nor its folder."""
    global _lock
    _lock = threading.Lock()
    _begun.clear()
    _kernels.clear()


os.register_at_fork(after_in_child=_renew)
