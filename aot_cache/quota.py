"""How much a folder of entries may hold: what was not used for longest goes first.

Nobody waits for anybody: every writer looks at the whole folder whenever it has written a share of
the room that was free when it last looked, so that several together do not pass the limit by more
than an entry each.
"""

import re
from dataclasses import dataclass

from ipex_inductor.aot_cache.folder import MEMORY_ONLY, Folder, RefusedError
from ipex_inductor.errors import ArgumentError

QUOTA = 8 << 30  # bytes
_SHARE = 16  # of the free room that one writer fills before it looks again
_LOW = 0.9  # of the limit is left when entries had to go, so that not every put looks for more


@dataclass(frozen=True)
class Swept:
    """What one look found and did: bytes held, entries evicted, their bytes, dead files removed."""

    held: int
    evicted: int
    freed: int
    reaped: int


class Room:
    """The room for entries in a folder."""

    def __init__(self, folder: Folder, quota: int = QUOTA) -> None:
        self.quota = quota
        self._folder = folder
        self._unwatched = 0  # bytes that may be written before the next look

    def take(self, size: int) -> Swept | None:
        """Make room for `size` bytes; what that took, None if nothing.

        Raises `RefusedError` for more than there can be, and `OSError`.
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
    """Reap, and evict until `size` more bytes fit in `quota`. Raises `OSError`, `RefusedError`."""
    reaped = folder.reap()
    entries = sorted(folder.files(), key=lambda file: file.used)
    held = sum(file.size for file in (*entries, *folder.files(".tmp")))
    if held + size <= quota:
        return Swept(held, 0, 0, reaped)
    evicted, freed, enough = 0, 0, held + size - int(_LOW * quota)
    for file in entries:
        if freed >= enough:
            break
        folder.remove(file.name)  # if somebody else did, it is gone all the same
        evicted, freed = evicted + 1, freed + file.size
    return Swept(held - freed, evicted, freed, reaped)


def quota_of(text: str) -> int:
    """The bytes that `512M`, `8GiB` or `1000` say; raises `ArgumentError`."""
    found = re.fullmatch(r"(\d+(?:\.\d*)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if found is None:
        raise ArgumentError("a size such as 512M or 8GiB", repr(text), "Write it so.")
    return int(float(found[1]) * (1 << 10 * " KMGT".index(found[2].upper() or " ")))
