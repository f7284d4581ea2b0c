"""Whether the C library here is new enough for a library that was linked elsewhere."""

import functools
import os
import re

Version = tuple[int, int]

_NEEDED = re.compile(rb"\0GLIBC_(\d+)\.(\d+)(?:\.\d+)?(?=\0)")  # in its table of names


def needed(library: bytes) -> Version:
    """The newest version of glibc whose symbols it names; (0, 0) if it names none."""
    return max(((int(a), int(b)) for a, b in _NEEDED.findall(library)), default=(0, 0))


@functools.cache
def here() -> Version | None:
    """The version that this process runs on; None for another C library."""
    try:
        named = os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (ValueError, OSError):
        return None
    found = re.fullmatch(r"glibc (\d+)\.(\d+).*", named)
    return (int(found[1]), int(found[2])) if found else None


def why_not(library: bytes) -> str:
    """Why the loader will not take it, "" if nothing is known against it."""
    wanted, own = needed(library), here()
    if wanted == (0, 0) or (own is not None and wanted <= own):
        return ""
    told = ".".join(map(str, own)) if own else "another C library"
    return f"linked with glibc {'.'.join(map(str, wanted))}, running on {told}"
