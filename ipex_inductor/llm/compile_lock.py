"""A lock of the process: compiled calls run side by side, a compilation runs alone.

Dynamo refuses compiled code in every thread while one of them traces.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class CompileLock:
    """A readers-writer lock that a thread may enter again while it holds it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running = 0
        self._compiling = False
        self._held = threading.local()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Hold off compilations while compiled code runs."""
        if getattr(self._held, "yes", False):
            yield
            return
        with self._changed:
            self._changed.wait_for(lambda: not self._compiling)
            self._running += 1
        self._held.yes = True
        try:
            yield
        finally:
            self._held.yes = False
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Wait for compiled code that runs in other threads, and hold off its next calls."""
        if getattr(self._held, "yes", False):
            yield
            return
        with self._changed:
            self._changed.wait_for(lambda: not self._compiling and not self._running)
            self._compiling = True
        self._held.yes = True
        try:
            yield
        finally:
            self._held.yes = False
            with self._changed:
                self._compiling = False
                self._changed.notify_all()
