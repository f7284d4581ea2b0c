"""Entries of this process alone: what could not be put on a disk, a bounded number of bytes."""

LIMIT = 256 << 20  # bytes


class Memory:
    """The entries that were kept last; no lock, so that a fork cannot leave it held."""

    label = origin = "memory"

    def __init__(self, limit: int = LIMIT) -> None:
        self._entries: dict[str, bytes] = {}
        self._limit = limit

    def read(self, name: str) -> bytes | None:
        """The bytes under a name, if they are held."""
        return self._entries.get(name)

    def keep(self, name: str, data: bytes) -> None:
        """Hold `data`; what was kept first goes where it is too much."""
        self._entries.pop(name, None)
        self._entries[name] = data
        excess = sum(map(len, list(self._entries.values()))) - self._limit
        for oldest in list(self._entries):
            if excess <= 0:
                return
            excess -= len(self._entries.pop(oldest, b""))

    def forget(self, name: str) -> None:
        """Let go of what the disk has by now."""
        self._entries.pop(name, None)
