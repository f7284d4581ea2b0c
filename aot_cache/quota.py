"""Size limit of a folder of entries: the least recently used entries are evicted first.

Writers do not wait for each other: each one scans the whole folder when it has written a share of
the free space of its last scan, so that several at once exceed the limit by no more than an entry
each.
"""

import re
from dataclasses import dataclass

from ipex_inductor.aot_cache.folder import MEMORY_ONLY, Folder, RefusedError
from ipex_inductor.errors import ArgumentError

QUOTA = 8 << 30  # bytes
_SHARE = 16  # share of the free space (1/16) that a writer fills before it scans again
_LOW = 0.9  # share of the limit kept on eviction, so that not every put has to evict


@dataclass(frozen=True)
class Swept:
    """The result of a scan: bytes held, entries evicted, their bytes, dead files removed."""

    held: int
    evicted: int
    freed: int
    reaped: int


class Room:
    """The space for entries in a folder."""

    def __init__(self, folder: Folder, quota: int = QUOTA) -> None:
        self.quota = quota
        self._folder = folder
        self._unwatched = 0  # bytes that may be written before the next scan

    def take(self, size: int) -> Swept | None:
        """Make space for `size` bytes and return the scan this took, None if none was needed.

        Raises `RefusedError` if the quota cannot hold so much, and `OSError`.
        """
        if size > _LOW * self.quota:
            raise RefusedError(f"{size} bytes do not fit a quota of {self.quota}: {MEMORY_ONLY}")
        self._unwatched -= size
        if self._unwatched >= 0:
            return None
        swept = sweep(self._folder, self.quota, size)
        self._unwatched = max(0, self.quota - swept.held) // _SHARE - size
        return swept


def sweep(folder: Folder, quota: int, size: int = 0) -> Swept:
    """Reap, and evict until `size` more bytes fit in `quota`; raise `OSError`, `RefusedError`."""
    reaped = folder.reap()
    entries = sorted(folder.files(), key=lambda file: file.used)
    held = sum(file.size for file in (*entries, *folder.files(".tmp")))
    if held + size <= quota:
        return Swept(held, 0, 0, reaped)
    evicted, freed, enough = 0, 0, held + size - int(_LOW * quota)
    for file in entries:
        if freed >= enough:
            break
        folder.remove(file.name)  # another process may have removed it already
        evicted, freed = evicted + 1, freed + file.size
    return Swept(held - freed, evicted, freed, reaped)


def quota_of(text: str) -> int:
    """Return the bytes that a text such as `512M`, `8GiB` or `1000` states.

    Raises `ArgumentError` for any other text.
    """
    match = re.fullmatch(r"(\d+(?:\.\d*)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ArgumentError("a size such as 512M or 8GiB", repr(text), "Use that form.")
    return int(float(match[1]) * (1 << 10 * " KMGT".index(match[2].upper() or " ")))
