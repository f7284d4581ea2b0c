"""The kernel cache: entries under keys: in memory, a folder of ours, layers, bundles, and remotes.

Never torn (an entry is published whole), never stale (the key names all that its code depends on),
never a stranger's (owner and mode are judged), and never in the way: what a disk or a network does
is a miss and a line in the log.
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
from ipex_inductor.aot_cache.survey import Found, checked, survey
from ipex_inductor.aot_cache.use import in_use

Build = Callable[[], tuple[dict[str, Any], bytes]]
Tier = Memory | Folder | Bundle | Remote
Event = tuple[str, str, int]  # what, in which tier ("" for all together), how much


def default_folder() -> Path:
    """Where kernels are kept unless told otherwise, by the version of the format of entries."""
    return home() / "kernels" / "1"


class Store:
    """Entries in `folder`, then in `layers` and `bundles` (only read), then in `remotes`.

    `bundles` are those the process uses unless given. The folder holds at most `quota` bytes. No
    method raises for what a disk or a network does. Threads may share a store; a forked child may
    go on with its parent's.
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
        """Those it was given, else those the process uses now."""
        return in_use() if self._bundles is None else self._bundles

    def get(self, key: Key) -> Entry | None:
        """The entry of that key, verified; None if no tier has a good one."""
        found = self.find(key)
        return found[0] if found else None

    def find(self, key: Key) -> tuple[Entry, str] | None:
        """As `get`, and where it was, in words."""
        found, events = self._found(key)
        self._count((*events, ("hits" if found else "misses", "", 1)))
        return found

    def holds(self, key: Key) -> bool:
        """Whether there is an entry under that key, good or not; no remote is asked."""
        name = key.digest + SUFFIX
        if self._memory.read(name) is not None:
            return True
        tiers: tuple[Folder | Bundle, ...] = (self.folder, *self.layers, *self.bundles)
        for tier in tiers:
            with suppress(OSError, RefusedError, CorruptError):
                tier.load(name, head=True)
                return True
        return False

    def come(self, key: Key) -> tuple[Entry, str] | None:
        """As `find`, but only what another process has put into our folder meanwhile."""
        found, events = self._found(key, (self.folder,))
        if found:
            self._count((*events, ("hits", "", 1)))
        return found

    def lock_path(self, key: Key, part: str = "") -> str | None:
        """What who builds this entry, or a part of it, holds; None where nothing is written."""
        try:
            return self.folder.lock_path(key.digest + part)
        except (OSError, RefusedError):
            return None

    def put(self, key: Key, meta: dict[str, Any], blob: bytes) -> bool:
        """Keep an entry; whether it is on the disk, and will be after a power loss.

        What the disk does not take is kept in memory. Raises `TypeError` for metadata that is no
        plain JSON.
        """
        try:
            data = pack(key.framed, meta, blob)
        except ValueError as error:
            say(f"an entry is not kept: {error}")
            return False
        kept = self._keep(key.digest + SUFFIX, data)
        for remote in self.remotes:
            remote.write(key.digest + SUFFIX, data)
        return kept

    def adopt(self, name: str, data: bytes) -> bool:
        """Keep an entry as it was packed elsewhere under that name; whether the folder has it.

        A good one that is there already stays. Raises `ValueError` for what is no entry of that
        name.
        """
        checked(name, data)
        with suppress(OSError, RefusedError, ValueError):
            checked(name, self.folder.load(name))
            return True
        return self._keep(name, data)

    def compile_once(self, key: Key, build: Build) -> Entry:
        """The entry of that key, built by one process while the others wait for it.

        Who has waited in vain builds it too. Raises what `build` raises.
        """
        if entry := self.get(key):
            return entry
        with self._alone(key):
            found, events = self._found(key)
            if found:
                self._count(events)
                return found[0]
            meta, blob = build()
            self.put(key, meta, blob)
            return Entry(meta, blob)

    def keys(self) -> Iterator[Mapping[str, Any]]:
        """The fields of every key but those of remotes, unverified: to explain, not to run."""
        return (found.key for found in self.heads())

    def heads(self) -> Iterator[Found]:
        """As `keys`, with the metadata; of each folder what was used last comes first."""
        folders: tuple[Folder | Bundle, ...] = (self.folder, *self.layers, *self.bundles)
        for folder in folders:
            with suppress(OSError, RefusedError):
                yield from (found for found in survey(folder) if found.key)

    def counts(self) -> dict[tuple[str, str], int]:
        """What happened in this process, by event and tier ("" for all tiers together).

        Events are hits, misses, corrupt, bytes read, bytes written, evicted, reaped.
        """
        return dict(self._counts)

    def _tiers(self) -> tuple[Tier, ...]:
        return (self.folder, self._memory, *self.layers, *self.bundles, *self.remotes)

    def _found(
        self, key: Key, tiers: tuple[Tier, ...] | None = None
    ) -> tuple[tuple[Entry, str] | None, list[Event]]:
        """The entry with its origin, and what happened on the way to it."""
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
        """Into the folder, or else into memory; whether it is in the folder."""
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
        path = self.lock_path(key)
        return lock.held(path) if path else nullcontext()

    def _count(self, events: Iterable[Event]) -> None:
        with _counting:
            for event, tier, by in events:
                self._counts[event, tier] += by


_counting = threading.Lock()


def _renew_lock() -> None:
    """A child would wait for ever for a thread that it did not get."""
    global _counting
    _counting = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)
