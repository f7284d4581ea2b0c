"""A pool of static caches: one call of `generate` leases a cache, and the next one reuses it."""

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

KEPT = 2  # caches of one shape that wait for the next call; others are released
MOST_IDLE = 4  # caches of all shapes that wait: batches of many sizes would fill the memory


class CachePool:
    """Caches by shape. A leased cache belongs to one call until its lease ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[tuple[Hashable, Any]] = []  # with their shapes, in the order of return
        self._layouts: dict[Hashable, Any] = {}
        self._leases = threading.local()
        self.made = 0

    @contextmanager
    def lease_scope(self) -> Iterator["Leases"]:
        """Return every cache that is leased inside to the pool at the end, also after an error."""
        outer = getattr(self._leases, "current", None)
        leases = self._leases.current = Leases(self)
        try:
            yield leases
        finally:
            self._leases.current = outer
            leases.end()

    @property
    def current(self) -> "Leases | None":
        """Return the leases of the innermost scope of this thread."""
        return getattr(self._leases, "current", None)

    def take(self, shape: Hashable, make: Callable[[], Any]) -> Any:
        """Return an idle cache of this shape, empty, or a new one."""
        with self._lock:
            places = [n for n, (each, _) in enumerate(self._idle) if each == shape]
            cache = self._idle.pop(places[-1])[1] if places else None
            self.made += cache is None
        if cache is None:
            with torch.inference_mode(False):  # later calls may write outside of inference mode
                return make()
        with torch.inference_mode(False), torch.no_grad():
            cache.reset()
        return cache

    def give_back(self, shape: Hashable, cache: Any) -> None:
        """Keep `cache` for later calls, and release what waits for the longest time."""
        with self._lock:
            if sum(each == shape for each, _ in self._idle) < KEPT:
                self._idle.append((shape, cache))
                del self._idle[:-MOST_IDLE]

    def learn_layout(self, key: Hashable, layout: Any) -> None:
        """Remember what later caches of one model are allocated with."""
        with self._lock:
            self._layouts.setdefault(key, layout)

    def layout(self, key: Hashable) -> Any:
        """Return the layout learned by this key, None if there is none yet."""
        with self._lock:
            return self._layouts.get(key)

    def clear(self) -> None:
        """Release the memory of all idle caches."""
        with self._lock:
            self._idle.clear()


class Leases:
    """Caches leased by one call of `generate`.

    Attributes:
        checked: the steps whose guards this call has checked, for `Steps.call`.
        runs_alone: whether no code of the caller runs between the tokens of this call.
        chooses: whether steps return the most likely tokens alone.
    """

    def __init__(self, pool: CachePool) -> None:
        self._pool = pool
        self.checked: dict[Hashable, Any] = {}
        self.runs_alone = self.chooses = False
        self._leased: list[tuple[Hashable, Any]] = []

    def take(self, shape: Hashable, make: Callable[[], Any]) -> Any:
        """Lease a cache of this shape from the pool."""
        cache = self._pool.take(shape, make)
        self._leased.append((shape, cache))
        return cache

    def keep_out(self, cache: Any) -> None:
        """End the lease of `cache` without its return: the caller of `generate` received it."""
        self._leased = [(shape, leased) for shape, leased in self._leased if leased is not cache]

    def end(self) -> None:
        """Return all leased caches."""
        for shape, cache in self._leased:
            self._pool.give_back(shape, cache)
        self._leased = []
