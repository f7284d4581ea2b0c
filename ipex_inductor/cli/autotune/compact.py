"""`ipex-inductor autotune compact`: merge the files of a database into one."""

from pathlib import Path
from typing import Annotated

import typer

from ipex_inductor.autotune.merging import compact
from ipex_inductor.cli.shared import AsJson, merged_facts, say, say_json, say_refused
from ipex_inductor.errors import ArgumentError


def autotune_compact(
    database: Annotated[Path, typer.Argument(metavar="DB", help="A folder of record files.")],
    as_json: AsJson = False,
) -> None:
    """Merge the record files that no writer has open into one file, then remove the originals.

    Safe at any time: files that a writer has open stay, and no file is removed before its records
    are on the disk. A file with a damaged line stays, and the line is reported on stderr.
    """
    if not database.is_dir():
        raise ArgumentError("a folder of record files", str(database), "Check the path.")
    merged = compact(database)
    say_refused(merged)
    if as_json:
        say_json(merged_facts(merged))
    elif merged.path is None:
        say("nothing to compact")
    else:
        say(f"{merged.records} records in {merged.path}; {len(merged.removed)} files removed")
