"""One process builds, the others wait: saves work, and nothing is wrong if it does not hold.

The lock is `flock` on a file that lives as long as it is held. Its holder touches it every second,
so that who waits for a stopped or lost one, or for a forked child that inherited the lock, goes on
alone. `filelock` has no such sign, and its fallback without `flock` outlives a killed holder.
The file is marked once it is held, so that a marked one that nobody holds is a killed holder's.
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
PATIENCE = 6.0  # s without one
_FIRST_PAUSE, _LONGEST_PAUSE = 1e-3, 0.05  # s between two tries
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True)
class Lock:
    """`file`: locked, or None. `waited`: s; 0.0 if nobody else held it.

    `left`: who held it last did not release it, but was killed.
    """

    file: int | None
    waited: float = 0.0
    left: bool = False


def _nothing() -> None: ...


@contextmanager
def held(
    path: str, longest: float = math.inf, before_waiting: Callable[[], None] = _nothing
) -> Iterator[Lock]:
    """Holds the lock `path`, or has waited for long enough: until no sign came, or `longest` s.

    A lock that cannot be had (no file, no locks on that disk) is not waited for.
    """
    lock = _acquired(path, longest, before_waiting)
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


def _acquired(path: str, longest: float, before_waiting: Callable[[], None]) -> Lock:
    """The lock, if it is to be had."""
    begun = since = time.monotonic()
    last, pause, waited = 0, _FIRST_PAUSE, 0.0
    while time.monotonic() - since < PATIENCE and waited < longest:
        try:
            file, sign = _tried(path)
        except OSError:
            break
        if file is not None:
            return Lock(file, waited, _marked(file))
        if not waited:
            before_waiting()
        if sign != last:
            last, since = sign, time.monotonic()
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
        waited = time.monotonic() - begun
    return Lock(None, waited)


def _marked(file: int) -> bool:
    """Whether it was marked; from now on it is."""
    with suppress(OSError):
        marked = disk.fstat(file).st_size > 0
        if not marked:
            disk.write(file, b"held")
        return marked
    return False


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
