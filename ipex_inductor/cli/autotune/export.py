"""`ipex-inductor autotune export`: write the table of winners."""

from pathlib import Path
from typing import Annotated

import typer

from ipex_inductor.autotune.database import write
from ipex_inductor.autotune.table import winners
from ipex_inductor.cli.shared import (
    AsJson,
    no_collector,
    records,
    say,
    say_json,
    say_refused,
)
from ipex_inductor.errors import ArgumentError


def autotune_export(
    database: Annotated[
        Path, typer.Argument(metavar="DB", help="A file of records, or a folder of such files.")
    ],
    out: Annotated[Path, typer.Argument(help="The file to write, or to replace.")],
    arch: Annotated[
        list[str] | None, typer.Option(help="Only problems of this architecture; may be repeated.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write what kernel selection reads: each problem's winner and runner-up, and their dates.

    Equal records give equal bytes. Times reported by other tools are left out.
    """
    read = records(database)
    if out.exists() and out.resolve() in {
        database.resolve(),
        *map(Path.resolve, database.glob("*")),
    }:
        advice = "Write it elsewhere: it would replace what it is made of."
        raise ArgumentError("a file that is no part of the database", str(out), advice)
    with no_collector():
        table = list(winners(read, arch or ()))
        say_refused(read)
        if not table:
            arch_text = f" for {', '.join(arch)}" if arch else ""
            advice = "Check the database and --arch."
            raise ArgumentError(f"a problem with a winner{arch_text}", "none", advice)
        write(out, table)
    if as_json:
        say_json({"file": str(out), "problems": len(table)})
    else:
        say(f"{len(table)} problems in {out}")
