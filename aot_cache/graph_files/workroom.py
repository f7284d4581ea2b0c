"""Folders in which torch keeps its files while it compiles, created and removed by a process.

Torch runs whatever is in its cache folder. With backend `ipex` that is a new folder per graph,
inside a folder of mode 0700 that this process created, with only files from verified entries in
it. So files that another user planted, a killed process tore or a disk damaged are never run.
"""

import atexit
import fcntl
import json
import os
import shutil
import stat
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from ipex_inductor.aot_cache.cache_root import ensure, home
from ipex_inductor.aot_cache.digest import frame_fields, unframe_fields
from ipex_inductor.aot_cache.folder import DEAD_AFTER
from ipex_inductor.aot_cache.log_once import say
from ipex_inductor.errors import OptionError

_HELD = ".held"  # locked by the process whose room it is, and by its forked children
_TRANSIENT = (".lock", ".tmp")  # suffixes of torch's transient files, which are not kept
_COMPRESSED = b"zlib\n"  # which begins no framed fields
_KERNEL_LIST = "__grp__"  # begins the names of Triton's lists of a kernel's files
_DEPTH = 8  # folders, of a file in an entry
_made: tuple[int, Path] | None = None
_lock = threading.Lock()


def room() -> Path:
    """Return the private folder of this process; raise `OSError` if none can be made.

    It is in the cache folder; if that must not be used, or torch could not compile there, it is in
    the folder for temporary files.
    """
    global _made
    with _lock:
        if _made is None or _made[0] != os.getpid() or not _made[1].is_dir():
            _made = os.getpid(), _make()
        return _made[1]


def is_room(path: str) -> bool:
    """Return whether a path is in the `room` of any process, such as a parent of this one."""
    with suppress(OptionError):
        return Path(path).is_relative_to(home() / "torch")
    return False


def files_in(folder: Path) -> Iterator[str]:
    """Yield the names below `folder` of files worth keeping, with "/", in order."""
    for above, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            path = Path(above, name)
            if path.suffix not in _TRANSIENT and stat.S_ISREG(path.lstat().st_mode):
                yield path.relative_to(folder).as_posix()


def pack_files(folder: Path) -> bytes:
    """Pack all files below `folder` with their names into one value."""
    return frame_fields({name: (folder / name).read_bytes() for name in files_in(folder)})


def compress_files(blob: bytes) -> bytes:
    """Compress packed files for transport: a sixth of the size, which takes longer to unpack."""
    return _COMPRESSED + zlib.compress(blob)


def unpack(
    blob: bytes, folder: Path, leaves_out: Callable[[str, bytes], bool] = lambda name, data: False
) -> frozenset[str]:
    """Write files that `pack_files` packed into `folder`, except existing files; return all names.

    Args:
        blob: the packed files.
        folder: where they go.
        leaves_out: takes a name and the data; returns whether that file is left out.

    Raises:
        ValueError: for names that could lead out of `folder`, before anything is written.
        OSError: if a file cannot be written.
    """
    files = {name: data for name, data in unpack_files(blob).items() if not leaves_out(name, data)}
    folder.mkdir(mode=0o700, exist_ok=True)
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with suppress(FileExistsError), open(path, "xb") as file:
            try:
                file.write(
                    _update_paths(path, data) if path.name.startswith(_KERNEL_LIST) else data
                )
                file.flush()
            except OSError:
                path.unlink()  # leave no partial file where torch looks
                raise
    return frozenset(files)


def _update_paths(path: Path, data: bytes) -> bytes:
    """Return Triton's list of a kernel's files with the paths they have now."""
    with suppress(ValueError, KeyError, TypeError):
        files = json.loads(data)["child_paths"]
        return json.dumps({"child_paths": {n: str(path.with_name(n)) for n in files}}).encode()
    return data


def unpack_files(blob: bytes) -> dict[str, bytes]:
    """Return files that `pack_files` packed; raise `ValueError` for names that could lead out."""
    if blob.startswith(_COMPRESSED):
        try:
            blob = zlib.decompress(blob[len(_COMPRESSED) :])
        except zlib.error as error:
            raise ValueError(f"not what was packed: {error}") from None
    files = unframe_fields(blob)
    for name, data in files.items():
        parts = name.split("/")
        if type(data) is not bytes or not {"", ".", ".."}.isdisjoint(parts) or "\0" in name:
            raise ValueError(f"{name!r} is no name of a file below a folder")
        if len(parts) > _DEPTH:
            raise ValueError(f"{name!r} lies too deep")
    return files


def complete(folder: Path) -> None:
    """Copy libraries built of sources in `folder` for other graphs of this process into it.

    Torch does not rebuild what a process has loaded already, and the next process would miss it.
    """
    for source in [*folder.rglob("*.cpp")]:
        stem = source.relative_to(folder).with_suffix("")
        pattern = f"{stem.name}.*"
        if len([*source.parent.glob(pattern)]) > 1:
            continue
        for library in folder.parent.glob(f"*/{stem.parent.as_posix()}/{pattern}"):
            if not (source.parent / library.name).exists() and library.suffix not in _TRANSIENT:
                shutil.copyfile(library, source.parent / library.name)


def _make() -> Path:
    """Create this process's folder and lock it, so that other processes do not remove it."""
    path = None
    with suppress(OSError, OptionError):
        above = ensure(home() / "torch")
        reason = _why_not_in(above.path) if above.usable else above.reason
        if not reason:
            _reap(above.path)
            path = Path(tempfile.mkdtemp(dir=above.path))
        else:
            say(f"{reason}: torch's files lie in {tempfile.gettempdir()} meanwhile")
    path = path or Path(tempfile.mkdtemp(prefix="ipex_inductor_"))
    # Left open, as it is locked for as long as this process or a forked child of it lives.
    lock_file = os.open(path / _HELD, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with suppress(OSError):  # some disks have no locks
        fcntl.flock(lock_file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    atexit.register(_leave, os.getpid(), path)
    return path


def _why_not_in(folder: Path) -> str:
    """Return why torch cannot compile in a folder: it splits its compiler's command line.

    "" if it can.
    """
    needs_quotes = any(letter.isspace() or letter in "\"'\\" for letter in str(folder))
    return f"torch's C++ compilers cannot be directed to {folder}" if needs_quotes else ""


def _leave(pid: int, path: Path) -> None:
    """Remove the folder at exit of the process that created it."""
    if os.getpid() != pid:  # a forked child inherits what is done at exit
        return
    try:
        if torchs := sys.modules.get("torch._inductor.async_compile"):
            torchs.shutdown_compile_workers()  # they write there until they end
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _reap(above: Path) -> None:
    """Remove the folders of killed processes."""
    for path in above.iterdir():
        with suppress(OSError):
            if time.time() - path.lstat().st_mtime > DEAD_AFTER and _is_dead(path):
                shutil.rmtree(path, ignore_errors=True)


def _is_dead(path: Path) -> bool:
    """Return whether no process holds the lock of a folder."""
    try:
        lock_file = os.open(path / _HELD, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return path.is_dir()
    try:
        fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock_file)
    return True


def _renew_lock() -> None:
    """Replace the lock in a forked child, which would wait forever for a missing thread."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)
