"""`ipex-inductor autotune merge`: merge several databases into one file."""

from pathlib import Path
from typing import Annotated

import typer

from ipex_inductor.autotune.merging import merge
from ipex_inductor.cli.shared import (
    AsJson,
    Databases,
    check_there,
    merged_facts,
    say,
    say_json,
    say_refused,
)
from ipex_inductor.errors import ArgumentError


def autotune_merge(
    out: Annotated[Path, typer.Argument(help="The file to write.")],
    databases: Databases,
    as_json: AsJson = False,
) -> None:
    """Write one file with every record of the databases once: equal bytes in any order.

    Nothing is removed. Damaged lines are left out and reported on stderr; choices that this version
    does not know are kept. To add to a file, name it among the databases too.
    """
    check_there(databases)
    if out.exists() and not any(_holds(database, out) for database in databases):
        advice = "Remove it, or name it among the databases to keep its records."
        raise ArgumentError("a file to write that is not there yet", f"{out}, which is", advice)
    merged = merge(out, databases)
    say_refused(merged)
    if as_json:
        say_json(merged_facts(merged))
    else:
        say(f"{merged.records} records in {out}")


def _holds(database: Path, file: Path) -> bool:
    """Return whether `database` is `file`, or the folder that contains it."""
    return database.samefile(file.parent if database.is_dir() else file)
