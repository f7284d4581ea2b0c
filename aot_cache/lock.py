"""Single-builder locks: one process builds, the others wait.

They save work; nothing breaks if they do not hold.

The lock is `flock` on a file that lives as long as it is held. Its holder touches the file every
second, so that waiters on a stopped or lost holder, or on a forked child that inherited the lock,
continue alone. `filelock` has no such sign, and its fallback without `flock` outlives a killed
holder. The file is marked once it is held, so that a marked and unlocked file is a killed holder's.
"""

import fcntl
import math
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from ipex_inductor.aot_cache import disk

PULSE = 1.0  # s between two signs of life
PATIENCE = 6.0  # s without a sign of life
_FIRST_PAUSE, _LONGEST_PAUSE = 1e-3, 0.05  # s between two tries
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True)
class Lock:
    """The result of `hold_lock`.

    `file`: descriptor of the locked file, or None. `waited`: seconds; 0.0 if no other process held
    it.
    `left`: the last holder did not release it, but was killed.
    """

    file: int | None
    waited: float = 0.0
    left: bool = False


def _nothing() -> None: ...


@contextmanager
def hold_lock(
    path: str, longest: float = math.inf, before_waiting: Callable[[], None] = _nothing
) -> Iterator[Lock]:
    """Hold the lock `path`, or stop waiting when no sign of life comes, or after `longest` s.

    A lock that cannot be had (no file, no locks on that disk) is not waited for. `before_waiting`
    is called once, when the lock is found held.
    """
    lock = _acquire(path, longest, before_waiting)
    if lock.file is None:
        yield lock
        return
    done = threading.Event()
    pulse = threading.Thread(target=_signs_of_life, args=(lock.file, done), daemon=True)
    try:
        pulse.start()
        yield lock
    finally:
        done.set()
        pulse.join()
        _release(path, lock.file)


def _acquire(path: str, longest: float, before_waiting: Callable[[], None]) -> Lock:
    """Return the lock, with `file` None if it could not be had in time."""
    begun = since = time.monotonic()
    last, pause, waited = 0, _FIRST_PAUSE, 0.0
    while time.monotonic() - since < PATIENCE and waited < longest:
        try:
            file, sign = _try_lock(path)
        except OSError:
            break
        if file is not None:
            return Lock(file, waited, _mark_file(file))
        if not waited:
            before_waiting()
        if sign != last:
            last, since = sign, time.monotonic()
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
        waited = time.monotonic() - begun
    return Lock(None, waited)


def _mark_file(file: int) -> bool:
    """Return whether the file was already marked, and mark it."""
    with suppress(OSError):
        marked = disk.fstat(file).st_size > 0
        if not marked:
            disk.write(file, b"held")
        return marked
    return False


def _try_lock(path: str) -> tuple[int | None, int]:
    """Return the file, if it could be locked, and the last sign of life of its holder."""
    file = disk.open(path, _FLAGS, 0o600)
    is_ours = False
    try:
        status = disk.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            raise OSError(f"{path} is no file of ours")
        is_ours = _lock_file(file) and _is_at(path, status)
        return (file if is_ours else None), status.st_mtime_ns
    finally:
        if not is_ours:
            disk.close(file)


def _lock_file(file: int) -> bool:
    """Return whether the file could be locked without waiting."""
    try:
        disk.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(path: str, status: os.stat_result) -> bool:
    """Return whether the file still has its name: its last holder may have removed it."""
    with suppress(FileNotFoundError):
        return os.path.samestat(disk.lstat(path), status)
    return False


def _signs_of_life(file: int, done: threading.Event) -> None:
    """Touch the file every `PULSE` seconds until `done` is set."""
    while not done.wait(PULSE):
        with suppress(OSError):
            disk.utime(file)


def _release(path: str, file: int) -> None:
    """Remove the lock file, then unlock and close it; ignore errors."""
    with suppress(OSError):
        disk.unlink(path)
    with suppress(OSError):  # explicitly, as a forked child may hold the file open
        disk.flock(file, fcntl.LOCK_UN)
    with suppress(OSError):
        disk.close(file)
