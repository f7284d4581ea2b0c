"""Who compiles a graph holds its lock, and others of this machine wait for what comes of it.

One thread of a process holds such a lock or waits for one, never both, and no other thread of it
does either meanwhile. So whoever is waited for waits for nobody, and no two wait for each other,
whatever graphs they compile inside of one another or in their threads.
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
    """Inside, this process may be the only one that compiles the graph whose lock is `path`.

    `look`: take what has come, after so many s of waiting; whether that is all there is to do.
    Where it is not though somebody was waited for, he failed, is stopped or takes too long: then
    nobody waits for the next one. One who was killed is waited for again, in whoever came first.
    """
    if not _busy.acquire(blocking=False):
        yield
        return

    def say() -> None:
        log.info("kernel cache: another process compiles this graph: waiting for it")
        before_waiting()

    with ExitStack() as until_done:
        until_done.callback(_busy.release)
        held = until_done.enter_context(lock.held(path, LONGEST, say))
        if held.waited and not held.left:
            until_done.close()
            look(held.waited)
        elif look(held.waited):
            until_done.close()
        yield


def _renew_lock() -> None:
    """A child holds nothing, whatever the thread did that it did not get."""
    global _busy
    _busy = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)
