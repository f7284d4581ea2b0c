"""One process builds, the others wait: saves work, and nothing is wrong if it does not hold.

The lock is `flock` on a file that lives as long as it is held. Its holder touches it every second,
so that who waits for a stopped or lost one, or for a forked child that inherited the lock, goes on
alone. `filelock` has no such sign, and its fallback without `flock` outlives a killed holder.
"""

import fcntl
import os
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ipex_inductor.aot_cache import disk

PULSE = 1.0  # s between two signs of life
PATIENCE = 6.0  # s without one
_FIRST_PAUSE, _LONGEST_PAUSE = 1e-3, 0.05  # s between two tries
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@contextmanager
def held(path: str) -> Iterator[bool]:
    """Holds the lock `path`, or has waited for long enough; whether it does hold it.

    A lock that cannot be had (no file, no locks on that disk) is not waited for.
    """
    file = _acquired(path)
    if file is None:
        yield False
        return
    done = threading.Event()
    pulse = threading.Thread(target=_signs_of_life, args=(file, done), daemon=True)
    try:
        pulse.start()
        yield True
    finally:
        done.set()
        pulse.join()
        _release(path, file)


def _acquired(path: str) -> int | None:
    """The locked file; None if it is not to be had."""
    last, since, pause = 0, time.monotonic(), _FIRST_PAUSE
    while time.monotonic() - since < PATIENCE:
        try:
            file, sign = _tried(path)
        except OSError:
            return None
        if file is not None:
            return file
        if sign != last:
            last, since = sign, time.monotonic()
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
    return None


def _tried(path: str) -> tuple[int | None, int]:
    """The file, if it could be locked, and the last sign of life of whoever holds it."""
    file = disk.open(path, _FLAGS, 0o600)
    ours = False
    try:
        found = disk.fstat(file)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
            raise OSError(f"{path} is no file of ours")
        ours = _locked(file) and _is_at(path, found)
        return (file if ours else None), found.st_mtime_ns
    finally:
        if not ours:
            disk.close(file)


def _locked(file: int) -> bool:
    try:
        disk.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(path: str, found: os.stat_result) -> bool:
    """Whether the file still has its name: who held it before may have removed it meanwhile."""
    with suppress(FileNotFoundError):
        return os.path.samestat(disk.lstat(path), found)
    return False


def _signs_of_life(file: int, done: threading.Event) -> None:
    while not done.wait(PULSE):
        with suppress(OSError):
            disk.utime(file)


def _release(path: str, file: int) -> None:
    with suppress(OSError):
        disk.unlink(path)
    with suppress(OSError):  # in words, as a forked child may hold the file open
        disk.flock(file, fcntl.LOCK_UN)
    with suppress(OSError):
        disk.close(file)
