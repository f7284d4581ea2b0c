"""Import of measurements by other tools, as records with the times that the tools report.

They serve display and comparison only. Their results are not verified and their noise is unknown,
so selection ignores them (`space.why_refused`, `pool.Pool.best`).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from ipex_inductor.autotune.database import Refusal
from ipex_inductor.autotune.foreign.inductor_log import inductor_mm_log
from ipex_inductor.autotune.foreign.told import Parsed, Told
from ipex_inductor.autotune.foreign.tunableop import tunableop
from ipex_inductor.autotune.record import Record, decode, encode
from ipex_inductor.autotune.space import why_refused

FORMATS: dict[str, Callable[[Path, Told, str], Parsed]] = {
    "tunableop": tunableop,
    "inductor-mm-log": inductor_mm_log,
}


@dataclass
class Imported:
    """The imported records, and the lines (or entries of a JSON list) that were refused."""

    records: list[Record] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)


def read(path: Path, form: str, told: Told) -> Imported:
    """Return the records of a file in one of `FORMATS`; raise `ArgumentError` for other files.

    The date of the records is the file's, since the tools do not store when they measured. So
    importing a file twice gives equal records.
    """
    date = datetime.fromtimestamp(path.stat().st_mtime, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    imported = Imported()
    for line, parsed in FORMATS[form](path, told, date):
        result = _check_record(parsed) if isinstance(parsed, Record) else parsed
        if isinstance(result, Record):
            imported.records.append(result)
        else:
            imported.refused.append(Refusal(path, line, result))
    return imported


def _check_record(record: Record) -> Record | str:
    """Return the record as decoded from its JSON, or the reason why it is invalid."""
    try:
        decoded = decode(encode(record))
    except msgspec.MsgspecError as error:
        return str(error)
    return why_refused(decoded) or decoded
