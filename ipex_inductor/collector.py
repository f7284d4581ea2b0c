"""The garbage collector of the process, off while a graph is looked for and nothing is compiled.

Importing Inductor and loading a graph make objects that stay, hundreds of thousands, and full
collections meanwhile walk them and all that torch has for nothing.
"""

import contextlib
import gc
import os
import threading
from collections.abc import Iterator

_PYTHONS = (
    5_000  # objects: Python 3.12 freezes some hundreds at its start, who asks for it many more
)
_pausing: set[int] = set()  # threads
_was_on = True
_lock = threading.Lock()


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """The collector is off until the block ends or this thread says `resume`.

    Threads may overlap: it is on again after the last of them. One that was off stays off, but a
    `gc.disable()` of another thread's meanwhile is undone: nothing tells it from ours.
    """
    global _was_on
    with _lock:
        if not _pausing:
            _was_on = gc.isenabled()
            gc.disable()
        _pausing.add(threading.get_ident())
    try:
        yield
    finally:
        resume()


def resume() -> None:
    """This thread goes on to what may leave much garbage."""
    with _lock:
        if threading.get_ident() in _pausing:
            _pausing.remove(threading.get_ident())
            if not _pausing and _was_on:
                _settle()
                gc.enable()


def _settle() -> None:
    """Count as old, for the next full collection, what was made meanwhile: most of it stays.

    Else one that walks everything is due at once. What users froze must stay frozen.
    """
    if gc.get_freeze_count() < _PYTHONS:
        gc.freeze()
        gc.unfreeze()


def _of_one_thread() -> None:
    """A forked child has none of the other threads, which would never resume."""
    global _lock
    _lock = threading.Lock()
    if _pausing:
        _pausing.clear()
        if _was_on:
            gc.enable()


os.register_at_fork(after_in_child=_of_one_thread)
