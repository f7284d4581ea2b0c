"""What other tools measured, as records that say so: times as reported, and nothing made up.

They are there to look at and to compare. Nobody verified the results here and nobody knows the
noise, so selection never sees them (`space.why_refused`, `pool.Pool.best`).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from ipex_inductor.autotune.database import Refusal
from ipex_inductor.autotune.inductor_log import inductor_mm_log
from ipex_inductor.autotune.record import Record, decode, encode
from ipex_inductor.autotune.space import why_refused
from ipex_inductor.autotune.told import Parsed, Told
from ipex_inductor.autotune.tunableop import tunableop

FORMATS: dict[str, Callable[[Path, Told, str], Parsed]] = {
    "tunableop": tunableop,
    "inductor-mm-log": inductor_mm_log,
}


@dataclass
class Imported:
    """Records, and the lines (or entries of a JSON list) that make none."""

    records: list[Record] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)


def read(path: Path, form: str, told: Told) -> Imported:
    """The records of a file in one of `FORMATS`; raises `ArgumentError` if it is no such file.

    When they were measured nobody says: they get the date of the file, so the same file makes the
    same records.
    """
    date = datetime.fromtimestamp(path.stat().st_mtime, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    found = Imported()
    for line, parsed in FORMATS[form](path, told, date):
        made = _checked(parsed) if isinstance(parsed, Record) else parsed
        if isinstance(made, Record):
            found.records.append(made)
        else:
            found.refused.append(Refusal(path, line, made))
    return found


def _checked(record: Record) -> Record | str:
    """As it will be read: its types are checked only then."""
    try:
        again = decode(encode(record))
    except msgspec.MsgspecError as error:
        return str(error)
    return why_refused(again) or again
