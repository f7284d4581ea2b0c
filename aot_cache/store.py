"""The kernel cache: entries by key, in memory, a private folder, layers, bundles and remotes.

Entries are never torn (each is published whole), never stale (the key names all that its code
depends on) and never another user's (owner and mode are checked). Errors of a disk or a network
are misses and lines in the log.
"""

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

from ipex_inductor.aot_cache import lock
from ipex_inductor.aot_cache.bundle import Bundle
from ipex_inductor.aot_cache.cache_root import home
from ipex_inductor.aot_cache.entry import CorruptError, Entry, pack, unpack
from ipex_inductor.aot_cache.folder import MEMORY_ONLY, SUFFIX, Folder, RefusedError
from ipex_inductor.aot_cache.key import Key
from ipex_inductor.aot_cache.log_once import say
from ipex_inductor.aot_cache.memory import Memory
from ipex_inductor.aot_cache.quota import QUOTA, Room
from ipex_inductor.aot_cache.remote import Remote
from ipex_inductor.aot_cache.survey import Found, check_entry, survey
from ipex_inductor.aot_cache.use import in_use

Build = Callable[[], tuple[dict[str, Any], bytes]]
Tier = Memory | Folder | Bundle | Remote
Event = tuple[str, str, int]  # event, tier ("" for all together), number


def default_folder() -> Path:
    """Return the default folder of the kernel cache, by version of the entry format."""
    return home() / "kernels" / "1"


class Store:
    """Entries in `folder`, then in `layers` and `bundles` (read-only), then in `remotes`.

    Args:
        folder: Folder of entries, by default `default_folder()`.
        layers: Further folders, never written.
        remotes: Remotes, or their URLs.
        bundles: Bundles; by default those the process uses at the time of each call.
        quota: Bytes that the folder may hold.

    No method raises for errors of a disk or a network. Threads may share a store; a forked child
    may continue to use its parent's.
    """

    def __init__(
        self,
        folder: Path | None = None,
        layers: Iterable[Path] = (),
        remotes: Iterable[Remote | str] = (),
        bundles: Iterable[Bundle] | None = None,
        quota: int = QUOTA,
    ) -> None:
        self.folder = Folder(folder or default_folder(), "ours")
        self.layers = tuple(Folder(path, f"layer {path}", writable=False) for path in layers)
        self.remotes = tuple(Remote(r) if isinstance(r, str) else r for r in remotes)
        self._memory = Memory()
        self._room = Room(self.folder, quota)
        self._bundles = None if bundles is None else tuple(bundles)
        self._counts: Counter[tuple[str, str]] = Counter()

    @property
    def bundles(self) -> tuple[Bundle, ...]:
        """Return the bundles given to the store, else the bundles the process uses now."""
        return in_use() if self._bundles is None else self._bundles

    def get(self, key: Key) -> Entry | None:
        """Return the entry of that key, verified; None if no tier has a valid one."""
        match = self.find(key)
        return match[0] if match else None

    def find(self, key: Key) -> tuple[Entry, str] | None:
        """Return the verified entry and a text that names its origin; None as for `get`."""
        match, events = self._search(key)
        self._count((*events, ("hits" if match else "misses", "", 1)))
        return match

    def holds(self, key: Key) -> bool:
        """Return whether there is an entry under that key, valid or not; skip remotes."""
        name = key.digest + SUFFIX
        if self._memory.read(name) is not None:
            return True
        tiers: tuple[Folder | Bundle, ...] = (self.folder, *self.layers, *self.bundles)
        for tier in tiers:
            with suppress(OSError, RefusedError, CorruptError):
                tier.load(name, head=True)
                return True
        return False

    def find_new(self, key: Key) -> tuple[Entry, str] | None:
        """Return the entry, as `find`, if another process has put it into our folder meanwhile."""
        match, events = self._search(key, (self.folder,))
        if match:
            self._count((*events, ("hits", "", 1)))
        return match

    def lock_path(self, key: Key, part: str = "") -> str | None:
        """Return the lock file for building this entry, or a part of it; None if not writable."""
        try:
            return self.folder.lock_path(key.digest + part)
        except (OSError, RefusedError):
            return None

    def put(self, key: Key, meta: dict[str, Any], blob: bytes) -> bool:
        """Store an entry; return whether it is on the disk, where it survives a power loss.

        An entry that the disk does not take is kept in memory. Raises `TypeError` for metadata that
        is not plain JSON.
        """
        try:
            data = pack(key.framed, meta, blob)
        except ValueError as error:
            say(f"an entry is not kept: {error}")
            return False
        is_on_disk = self._keep(key.digest + SUFFIX, data)
        for remote in self.remotes:
            remote.write(key.digest + SUFFIX, data)
        return is_on_disk

    def adopt(self, name: str, data: bytes) -> bool:
        """Store an entry that was packed elsewhere; return whether the folder has it.

        A valid entry that exists already stays. Raises `ValueError` for data that is no entry of
        that name.
        """
        check_entry(name, data)
        with suppress(OSError, RefusedError, ValueError):
            check_entry(name, self.folder.load(name))
            return True
        return self._keep(name, data)

    def compile_once(self, key: Key, build: Build) -> Entry:
        """Return the entry of that key, built by one process while others wait for it.

        A process that has waited in vain builds it too. Raises what `build` raises.
        """
        if entry := self.get(key):
            return entry
        with self._alone(key):
            match, events = self._search(key)
            if match:
                self._count(events)
                return match[0]
            meta, blob = build()
            self.put(key, meta, blob)
            return Entry(meta, blob)

    def keys(self) -> Iterator[Mapping[str, Any]]:
        """Yield the fields of all keys except remotes', unverified: to explain, not to run."""
        return (head.key for head in self.heads())

    def heads(self) -> Iterator[Found]:
        """Yield keys with metadata, as `keys` does; most recently used first in each folder."""
        folders: tuple[Folder | Bundle, ...] = (self.folder, *self.layers, *self.bundles)
        for folder in folders:
            with suppress(OSError, RefusedError):
                yield from (head for head in survey(folder) if head.key)

    def counts(self) -> dict[tuple[str, str], int]:
        """Return the number of events in this process, by event and tier ("" for all together).

        Events are hits, misses, corrupt, bytes read, bytes written, evicted, reaped.
        """
        return dict(self._counts)

    def _tiers(self) -> tuple[Tier, ...]:
        """Return all tiers in the order they are searched."""
        return (self.folder, self._memory, *self.layers, *self.bundles, *self.remotes)

    def _search(
        self, key: Key, tiers: tuple[Tier, ...] | None = None
    ) -> tuple[tuple[Entry, str] | None, list[Event]]:
        """Return the entry with its origin, and the events of the search."""
        name = key.digest + SUFFIX
        events: list[Event] = []
        for tier in self._tiers() if tiers is None else tiers:
            data = tier.read(name)
            if data is not None:
                try:
                    entry = unpack(data, key.framed)
                except CorruptError as error:
                    say(f"{name} in {tier.label} is not used: {error}")
                    events.append(("corrupt", tier.label, 1))
                else:
                    events += ("hits", tier.label, 1), ("bytes read", tier.label, len(data))
                    if isinstance(tier, Remote):
                        self._keep(name, data)
                    return (entry, tier.origin), events
            events.append(("misses", tier.label, 1))
        return None, events

    def _keep(self, name: str, data: bytes) -> bool:
        """Write an entry to the folder, or else to memory; return whether it is in the folder."""
        try:
            self.folder.check_writable()
            swept = self._room.take(len(data))
            self.folder.publish(name, data)
        except (OSError, RefusedError) as error:
            at = self.folder.path
            say(
                str(error)
                if isinstance(error, RefusedError)
                else f"{at}: {error.strerror}: {MEMORY_ONLY}"
            )
            self._memory.keep(name, data)
            return False
        self._memory.forget(name)
        ours = self.folder.label
        self._count([("bytes written", ours, len(data))])
        if swept:
            self._count([("evicted", ours, swept.evicted), ("reaped", ours, swept.reaped)])
        return True

    def _alone(self, key: Key) -> AbstractContextManager[object]:
        """Return the context in which only this process builds that entry, where possible."""
        path = self.lock_path(key)
        return lock.hold_lock(path) if path else nullcontext()

    def _count(self, events: Iterable[Event]) -> None:
        """Add events to the counters."""
        with _counting:
            for event, tier, by in events:
                self._counts[event, tier] += by


_counting = threading.Lock()


def _renew_lock() -> None:
    """Replace the lock in a forked child, which would wait forever for a missing thread."""
    global _counting
    _counting = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)
