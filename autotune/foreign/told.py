"""Shared parts of the importers: facts from the user that files lack, and units of time."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ipex_inductor.autotune.record import Record

MICROSECONDS = 1000.0  # in a millisecond, the unit of both tools
UNKNOWN = "unknown"


@dataclass(frozen=True)
class Told:
    """Facts that the user supplies because the imported file may lack them."""

    arch: str | None = None
    device: str | None = None
    torch: str | None = None
    dtype: str | None = None
    op: str | None = None


# The number of a line or entry, from one, and its record or the reason why there is none.
Parsed = Iterator[tuple[int, Record | str]]


def microseconds(milliseconds: Any) -> float | None:
    """Return milliseconds, the unit of both tools, in microseconds; None if it is no time.

    A failed choice has no finite positive time.
    """
    try:
        time = float(milliseconds) * MICROSECONDS
    except (TypeError, ValueError):
        return None
    return time if 0 < time < math.inf else None
