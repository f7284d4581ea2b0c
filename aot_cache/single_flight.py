"""Single-flight compilation: one process compiles a graph, others on the machine wait for it.

One thread of a process holds such a lock or waits for one, never both, and no other thread of it
does either at that time. So a process that is waited for never waits itself, and no two wait for
each other, whatever graphs they compile inside of one another or in their threads.
"""

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from ipex_inductor.aot_cache import lock

log = logging.getLogger("ipex_inductor")

LONGEST = 600.0  # s that a graph is waited for, however lively its compiler is
_busy = threading.Lock()


@contextmanager
def alone(
    path: str, look: Callable[[float], bool], before_waiting: Callable[[], None]
) -> Iterator[None]:
    """Hold the lock `path` of a graph, so that only this process compiles it, where possible.

    If another process held the lock but its result is missing, because it failed, is stopped or
    takes too long, this process compiles without holding the lock. If the holder was killed, this
    process compiles with the lock held, and others wait for it.

    Args:
        path: Lock file of the graph.
        look: Takes the result of another process, given the seconds waited; returns whether it is
            complete.
        before_waiting: Called once before this process waits.
    """
    if not _busy.acquire(blocking=False):
        yield
        return

    def say() -> None:
        log.info("kernel cache: another process compiles this graph: waiting for it")
        before_waiting()

    with ExitStack() as until_done:
        until_done.callback(_busy.release)
        held = until_done.enter_context(lock.hold_lock(path, LONGEST, say))
        if held.waited and not held.left:
            until_done.close()
            look(held.waited)
        elif look(held.waited):
            until_done.close()
        yield


def _renew_lock() -> None:
    """Replace the lock in a forked child, which does not inherit the thread that held it."""
    global _busy
    _busy = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)
