"""Check that this machine's glibc is new enough for a library that was linked elsewhere."""

import functools
import os
import re

Version = tuple[int, int]

_NEEDED = re.compile(rb"\0GLIBC_(\d+)\.(\d+)(?:\.\d+)?(?=\0)")  # in its table of names


def required_version(library: bytes) -> Version:
    """Return the newest glibc version whose symbols a library names; (0, 0) if it names none."""
    return max(((int(a), int(b)) for a, b in _NEEDED.findall(library)), default=(0, 0))


@functools.cache
def running_version() -> Version | None:
    """Return the glibc version that this process runs on; None for another C library."""
    try:
        version = os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (ValueError, OSError):
        return None
    match = re.fullmatch(r"glibc (\d+)\.(\d+).*", version)
    return (int(match[1]), int(match[2])) if match else None


def why_not(library: bytes) -> str:
    """Return why the loader cannot load a library, "" if no reason is known."""
    wanted, running = required_version(library), running_version()
    if wanted == (0, 0) or (running is not None and wanted <= running):
        return ""
    running_text = ".".join(map(str, running)) if running else "another C library"
    return f"linked with glibc {'.'.join(map(str, wanted))}, running on {running_text}"
