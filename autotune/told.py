"""What other tools' files say, and what they leave to the user."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ipex_inductor.autotune.record import Record

MICROSECONDS = 1000.0  # of the milliseconds that both report
UNKNOWN = "unknown"


@dataclass(frozen=True)
class Told:
    """What a file may leave out, and the user says."""

    arch: str | None = None
    device: str | None = None
    torch: str | None = None
    dtype: str | None = None
    op: str | None = None


# A line or entry, counted from one, and the record it makes or the reason why it makes none.
Parsed = Iterator[tuple[int, Record | str]]


def microseconds(told: Any) -> float | None:
    """Of milliseconds, which all report; None for what is no time, as that of what failed."""
    try:
        time = float(told) * MICROSECONDS
    except (TypeError, ValueError):
        return None
    return time if 0 < time < math.inf else None
