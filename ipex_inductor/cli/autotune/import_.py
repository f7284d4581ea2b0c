"""`ipex-inductor autotune import`: add records of other databases, or times of other tools."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ipex_inductor.autotune.database import add
from ipex_inductor.autotune.foreign.foreign import Imported, read
from ipex_inductor.autotune.foreign.told import Told
from ipex_inductor.cli.shared import (
    AsJson,
    check_there,
    records,
    say,
    say_json,
    say_refused,
)
from ipex_inductor.errors import ArgumentError


class Format(StrEnum):
    """The file formats that `--format` accepts."""

    RECORDS = "records"
    TUNABLEOP = "tunableop"
    INDUCTOR_MM_LOG = "inductor-mm-log"


def autotune_import(
    files: Annotated[list[Path], typer.Argument(metavar="FILE", help="What to take in.")],
    into: Annotated[Path, typer.Option(help="The database: a folder, made if it is missing.")],
    form: Annotated[
        Format, typer.Option("--format", help="What wrote the files.")
    ] = Format.RECORDS,
    arch: Annotated[str | None, typer.Option(help="Of the device, if the files lack it.")] = None,
    device: Annotated[str | None, typer.Option(help="Its name, which they lack.")] = None,
    torch: Annotated[str | None, typer.Option(help="Version, if they lack it.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Of the operands, if they lack it.")] = None,
    op: Annotated[
        str | None, typer.Option(help="mm, addmm or int_mm, if the log of torch 2.11 is of one.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Add the records of other files to a database, or the times that other tools report.

    Records are checked by their digests. TunableOp's results and Inductor's log
    (TORCHINDUCTOR_MM_LOGGING_FILE) become records that name their source: `show` and `compare` read
    them, selection never uses them, as their kernels were not verified.
    """
    check_there(files)
    if into.exists() and not into.is_dir():
        raise ArgumentError("a folder to import into", f"{into}, a file", "Name a folder.")
    defaults = Told(arch, device, torch, dtype, op)
    imported = _records(files) if form is Format.RECORDS else _foreign(files, form, defaults)
    say_refused(imported)
    if not imported.records:
        advice = "Check --format, and the lines above."
        raise ArgumentError(f"something to import ({form})", "no record", advice)
    path = add(into, imported.records)
    if as_json:
        refused = [str(refusal) for refusal in imported.refused]
        say_json({"file": str(path), "records": len(imported.records), "refused": refused})
    else:
        say(f"{len(imported.records)} records in {path}")


def _records(files: list[Path]) -> Imported:
    read_again = records(*files)
    return Imported(list(read_again), read_again.refused)


def _foreign(files: list[Path], form: Format, defaults: Told) -> Imported:
    """Read all files of another tool before anything is written."""
    read_each = [read(path, form, defaults) for path in files]
    return Imported(
        [record for imported in read_each for record in imported.records],
        [refusal for imported in read_each for refusal in imported.refused],
    )
