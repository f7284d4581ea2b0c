"""A folder of entries: read without locks, published whole and durably, and nobody else's.

The folder is judged with all above it when first used, and again whenever it is not the same; each
file is judged on the descriptor it is read from.
"""

import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ipex_inductor.aot_cache import disk, entry
from ipex_inductor.aot_cache.cache_root import ensure, state
from ipex_inductor.aot_cache.log_once import say

SUFFIX = ".entry"
MEMORY_ONLY = "kernels are kept in memory only"
_TEMP, _LOCK = ".tmp", ".lock"
TOUCH_AFTER = 3600.0  # s; how exactly it is known when an entry was last used
DEAD_AFTER = 3600.0  # s; then a temporary file that nobody holds was left by a killed writer
_CHUNK = 2 << 20  # bytes read before the length they state is believed; a key is shorter
GUARDED = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class RefusedError(Exception):
    """A file or folder that is not ours alone, or not of the kind it should be."""


@dataclass(frozen=True)
class File:
    """A file of the cache: its name, size in bytes, and when it was last used."""

    name: str
    size: int
    used: float


class Folder:
    """The entries in `path`; a layer (`writable=False`) is never written, and may be root's."""

    def __init__(self, path: Path, label: str, writable: bool = True) -> None:
        self.path = path.absolute()
        self.label = label
        self.origin = f"{path}" if writable else f"the layer {path}"
        self._at = str(self.path)
        self._layer = not writable
        self._judged: tuple[int, ...] | None = None  # the identity of a folder found to be ours
        self._why_not_written = ""

    # --- reading

    def read(self, name: str) -> bytes | None:
        """The bytes under a name; None if there are none to be had, which is said unless usual."""
        try:
            return self.load(name, use=not self._layer)
        except FileNotFoundError:
            return None
        except RefusedError as error:
            say(str(error))
        except OSError as error:
            say(f"entries in {self._at} cannot be read: {error.strerror}")
        return None

    def load(self, name: str, head: bool = False, use: bool = False) -> bytes:
        """The bytes of a file that is ours, or its key and metadata; `use` is noted.

        Raises `RefusedError`, `OSError`, and `CorruptError` if there is no end of a key.
        """
        self._judge()
        path = f"{self._at}/{name}"
        try:
            file = disk.open(path, os.O_RDONLY | GUARDED)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise RefusedError(f"{path} is a symbolic link: not used") from None
            raise
        try:
            found = disk.fstat(file)
            if reason := why_refused(found, self._layer):
                raise RefusedError(f"{path} {reason}: not used")
            if use and disk.time() - found.st_mtime > TOUCH_AFTER:
                with suppress(OSError):  # it may have gone to a read-only mount
                    disk.utime(file)
            return _bytes(file, found.st_size, head)
        finally:
            disk.close(file)

    def files(self, suffix: str = SUFFIX) -> Iterator[File]:
        """The files with that ending, in no order; nothing where the folder is not to be used."""
        self._judge()
        for name in disk.listdir(self._at):
            if name.endswith(suffix):
                with suppress(FileNotFoundError):
                    found = disk.lstat(f"{self._at}/{name}")
                    yield File(name, found.st_size, found.st_mtime)

    # --- writing

    def publish(self, name: str, data: bytes) -> None:
        """Put `data` under `name` whole or not at all; it is on the disk when this returns.

        Raises `RefusedError` or `OSError`, and then leaves nothing behind.
        """
        self.check_writable()
        temp = f"{self._at}/.{name}.{secrets.token_hex(8)}{_TEMP}"
        file = disk.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | GUARDED, 0o600)
        try:
            with suppress(OSError):  # for who reaps; there are disks without locks
                disk.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _write(file, data)
            disk.fsync(file)
            disk.rename(temp, f"{self._at}/{name}")
        except BaseException:
            with suppress(OSError):
                disk.unlink(temp)
            raise
        finally:
            disk.close(file)
        sync_folder(self.path)

    def check_writable(self) -> None:
        """Make the folder if need be; raises `RefusedError` with the reason it is not written."""
        self._judge(make=True)
        if self._layer or self._why_not_written:
            raise RefusedError(f"{self._why_not_written or self._at}: {MEMORY_ONLY}")

    def remove(self, name: str) -> bool:
        """Whether the file went by this call."""
        with suppress(OSError):
            disk.unlink(f"{self._at}/{name}")
            return True
        return False

    def reap(self) -> int:
        """Remove what killed processes left: old temporary files and locks that nobody holds."""
        left = [*self.files(_TEMP), *self.files(_LOCK)]
        dead = [f for f in left if abs(disk.time() - f.used) > DEAD_AFTER]
        return sum(self._unheld(f.name) and self.remove(f.name) for f in dead)

    def lock_path(self, name: str) -> str:
        """The file that who builds this entry holds; raises `RefusedError` where none can be."""
        self.check_writable()
        return f"{self._at}/.{name}{_LOCK}"

    def _unheld(self, name: str) -> bool:
        with suppress(OSError):
            file = disk.open(f"{self._at}/{name}", os.O_RDONLY | GUARDED)
            try:
                disk.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            finally:
                disk.close(file)
        return False

    # --- judging

    def _judge(self, make: bool = False) -> None:
        """Raises `RefusedError` if others can write the folder, `OSError` if it is not there."""
        try:
            if self._judged and _identity(disk.lstat(self._at)) == self._judged:
                return
        except OSError:
            self._judged = None
        found = ensure(self.path) if make else state(self.path, layer=self._layer)
        if self._layer and not found.exists:
            raise RefusedError(f"{self._at} is not there: not used")
        if not found.private or (make and not found.exists):
            raise RefusedError(f"{found.reason}: {'not used' if self._layer else MEMORY_ONLY}")
        self._judged = _identity(disk.lstat(self._at))
        self._why_not_written = found.reason


def why_refused(found: os.stat_result, layer: bool) -> str:
    """Why a file is not read, "" if it is; a `layer` is only read, and so may be root's."""
    if not stat.S_ISREG(found.st_mode):
        return "is no regular file"
    if found.st_uid != os.geteuid() and not (layer and found.st_uid == 0):
        return f"belongs to uid {found.st_uid}"
    if found.st_mode & _OTHERS_WRITE:
        return f"has mode {stat.S_IMODE(found.st_mode):04o}: others can write it"
    # Package managers link equal files of a layer; here it is a name that somebody else gave.
    if found.st_nlink > 1 and not layer:
        return "has another name elsewhere"
    return ""


def sync_folder(path: Path) -> None:
    """Keep the names in a folder: without this a new one may be gone after a power loss."""
    file = disk.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        disk.fsync(file)
    finally:
        disk.close(file)


def _identity(found: os.stat_result) -> tuple[int, ...]:
    """Mode, inode, device, links and owner; and who we are."""
    return (*found[:5], os.geteuid())


def _bytes(file: int, size: int, head: bool) -> bytes:
    """All of a file, but no more than the beginning of a large one that is none of ours."""
    first = disk.read(file, min(size, _CHUNK))
    if head:
        return first[: entry.head_end(first, size)]
    if len(first) == size or not entry.is_whole(first, size):
        return first
    parts, missing = [first], size - len(first)
    while missing and (part := disk.read(file, missing)):
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)


def _write(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[disk.write(file, view) :]
