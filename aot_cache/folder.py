"""Folders of entries: read without locks, published atomically and durably, private to the user.

A folder and all its ancestors are checked when it is first used, and again whenever its identity
has changed. Each file is checked on the descriptor it is read from.
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
TOUCH_AFTER = 3600.0  # s; resolution of an entry's time of last use
DEAD_AFTER = 3600.0  # s; older unlocked temporary files were left by a killed writer
_CHUNK = 2 << 20  # bytes read before the stated length is trusted; a key is shorter
GUARDED = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class RefusedError(Exception):
    """A file or folder that other users can write, or of the wrong kind."""


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
        self._judged: tuple[int, ...] | None = None  # identity of a folder that passed
        self._why_not_written = ""

    # --- reading

    def read(self, name: str) -> bytes | None:
        """Return the bytes under a name; None if they cannot be had, logged unless just missing."""
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
        """Return the bytes of a private file; with `head`, its key and metadata; record the `use`.

        Raises `RefusedError`, `OSError`, and `CorruptError` if the end of the key is unknown.
        """
        self._check_folder()
        path = f"{self._at}/{name}"
        try:
            file = disk.open(path, os.O_RDONLY | GUARDED)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise RefusedError(f"{path} is a symbolic link: not used") from None
            raise
        try:
            status = disk.fstat(file)
            if reason := why_refused(status, self._layer):
                raise RefusedError(f"{path} {reason}: not used")
            if use and disk.time() - status.st_mtime > TOUCH_AFTER:
                with suppress(OSError):  # it may have gone to a read-only mount
                    disk.utime(file)
            return _bytes(file, status.st_size, head)
        finally:
            disk.close(file)

    def files(self, suffix: str = SUFFIX) -> Iterator[File]:
        """Yield the files with that suffix, unordered.

        Raises `RefusedError` if the folder must not be used, `OSError` if it cannot be read.
        """
        self._check_folder()
        for name in disk.listdir(self._at):
            if name.endswith(suffix):
                with suppress(FileNotFoundError):
                    status = disk.lstat(f"{self._at}/{name}")
                    yield File(name, status.st_size, status.st_mtime)

    # --- writing

    def publish(self, name: str, data: bytes) -> None:
        """Write `data` under `name` atomically; it is on the disk when this returns.

        Raises `RefusedError` or `OSError`, and then leaves nothing behind.
        """
        self.check_writable()
        temp = f"{self._at}/.{name}.{secrets.token_hex(8)}{_TEMP}"
        file = disk.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | GUARDED, 0o600)
        try:
            with suppress(OSError):  # so that `reap` spares it; some disks have no locks
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
        """Create the folder if needed; raise `RefusedError` if it must not be written."""
        self._check_folder(make=True)
        if self._layer or self._why_not_written:
            raise RefusedError(f"{self._why_not_written or self._at}: {MEMORY_ONLY}")

    def remove(self, name: str) -> bool:
        """Remove a file and return whether this call removed it."""
        with suppress(OSError):
            disk.unlink(f"{self._at}/{name}")
            return True
        return False

    def reap(self) -> int:
        """Remove old temporary and lock files that killed processes left; return the count."""
        leftovers = [*self.files(_TEMP), *self.files(_LOCK)]
        dead = [f for f in leftovers if abs(disk.time() - f.used) > DEAD_AFTER]
        return sum(self._is_unlocked(f.name) and self.remove(f.name) for f in dead)

    def lock_path(self, name: str) -> str:
        """Return the lock file for building an entry; raise `RefusedError` if none can be made."""
        self.check_writable()
        return f"{self._at}/.{name}{_LOCK}"

    def _is_unlocked(self, name: str) -> bool:
        """Return whether no process holds a lock on that file."""
        with suppress(OSError):
            file = disk.open(f"{self._at}/{name}", os.O_RDONLY | GUARDED)
            try:
                disk.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            finally:
                disk.close(file)
        return False

    # --- checking

    def _check_folder(self, make: bool = False) -> None:
        """Raise `RefusedError` if others can write the folder, `OSError` if it is missing."""
        try:
            if self._judged and _identity(disk.lstat(self._at)) == self._judged:
                return
        except OSError:
            self._judged = None
        checked = ensure(self.path) if make else state(self.path, layer=self._layer)
        if self._layer and not checked.exists:
            raise RefusedError(f"{self._at} is not there: not used")
        if not checked.private or (make and not checked.exists):
            raise RefusedError(f"{checked.reason}: {'not used' if self._layer else MEMORY_ONLY}")
        self._judged = _identity(disk.lstat(self._at))
        self._why_not_written = checked.reason


def why_refused(status: os.stat_result, layer: bool) -> str:
    """Return why a file must not be read, "" if it may be; a `layer` may belong to root."""
    if not stat.S_ISREG(status.st_mode):
        return "is no regular file"
    if status.st_uid != os.geteuid() and not (layer and status.st_uid == 0):
        return f"belongs to uid {status.st_uid}"
    if status.st_mode & _OTHERS_WRITE:
        return f"has mode {stat.S_IMODE(status.st_mode):04o}: others can write it"
    # Package managers hard-link equal files of a layer; elsewhere a second name is another user's.
    if status.st_nlink > 1 and not layer:
        return "has another name elsewhere"
    return ""


def sync_folder(path: Path) -> None:
    """Flush a folder's names to disk: without this a new name may be lost on power failure."""
    file = disk.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        disk.fsync(file)
    finally:
        disk.close(file)


def _identity(status: os.stat_result) -> tuple[int, ...]:
    """Return mode, inode, device, links and owner of a file, and our effective user."""
    return (*status[:5], os.geteuid())


def _bytes(file: int, size: int, head: bool) -> bytes:
    """Return all bytes of a file; only the first chunk of a large one that is no entry."""
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
    """Write all of `data`, however many calls that takes."""
    view = memoryview(data)
    while view:
        view = view[disk.write(file, view) :]
