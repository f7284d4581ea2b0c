"""Memory tier of the kernel cache: entries that no disk took, up to a number of bytes."""

LIMIT = 256 << 20  # bytes


class Memory:
    """The entries that were kept last; without a lock, so that a fork cannot leave one held."""

    label = origin = "memory"

    def __init__(self, limit: int = LIMIT) -> None:
        self._entries: dict[str, bytes] = {}
        self._limit = limit

    def read(self, name: str) -> bytes | None:
        """Return the bytes under a name, None if they are not held."""
        return self._entries.get(name)

    def keep(self, name: str, data: bytes) -> None:
        """Hold `data`; drop the oldest entries if the limit is exceeded."""
        self._entries.pop(name, None)
        self._entries[name] = data
        excess = sum(map(len, list(self._entries.values()))) - self._limit
        for oldest in list(self._entries):
            if excess <= 0:
                return
            excess -= len(self._entries.pop(oldest, b""))

    def forget(self, name: str) -> None:
        """Drop an entry that is on the disk by now."""
        self._entries.pop(name, None)
