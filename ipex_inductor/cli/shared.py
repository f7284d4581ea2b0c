"""Shared options, input and output of the `autotune` verbs."""

import gc
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from ipex_inductor.autotune.comparison.words import replace_unprintable
from ipex_inductor.autotune.database import Records
from ipex_inductor.autotune.foreign.foreign import Imported
from ipex_inductor.autotune.merging import Merged
from ipex_inductor.errors import ArgumentError
from ipex_inductor.reporting.listing import show

Databases = Annotated[
    list[Path], typer.Argument(metavar="DB", help="Files of records, or folders of such files.")
]
AsJson = Annotated[bool, typer.Option("--json", help="The facts as JSON on stdout.")]
Everything = Annotated[bool, typer.Option("--all", help="Every row, however many.")]

ROWS, REFUSALS = 40, 5  # shown unless --all; shown always
READER_LEFT = 141  # the exit code of shells for SIGPIPE; no verdict uses it


def check_there(sources: Iterable[Path]) -> None:
    """Raise `ArgumentError` for a database that does not exist."""
    for source in sources:
        if not source.exists():
            expected = "a file of records, or a folder of such files"
            raise ArgumentError(expected, f"{source}, which is not there", "Check the path.")


def records(*sources: Path) -> Records:
    """Return the records of `sources`, also of choices unknown here; raise `ArgumentError`."""
    check_there(sources)
    return Records(*sources, known=False)


def say_refused(*read: Records | Merged | Imported) -> None:
    """Report on stderr how many lines were refused, and the first of them."""
    say_reasons("lines", [str(refusal) for source in read for refusal in source.refused])


def say_reasons(what: str, reasons: Sequence[str]) -> None:
    """Report on stderr how many items were refused, and the first reasons; nothing for none."""
    if reasons:
        print(f"{len(reasons)} {what} refused:", file=sys.stderr)
        for reason in reasons[:REFUSALS]:
            print(f"  {replace_unprintable(reason)}", file=sys.stderr)
        if len(reasons) > REFUSALS:
            print(f"  and {len(reasons) - REFUSALS} more", file=sys.stderr)


def say(*parts: Any) -> None:
    """Print listings and lines on stdout, as wide as the terminal, in full width without one."""
    console = Console()
    with console.capture() as text:
        show(console, *parts)
    _write(text.get())


def say_json(facts: dict[str, Any]) -> None:
    """Print `facts` as JSON on stdout; non-finite numbers become null."""
    _write(msgspec.json.format(msgspec.json.encode({"schema": 1} | facts), indent=2).decode())
    _write("\n")


def merged_facts(merged: Merged) -> dict[str, Any]:
    """Return the result of a merge as plain data."""
    return {
        "file": merged.path and str(merged.path),
        "records": merged.records,
        "refused": [str(refusal) for refusal in merged.refused],
        "removed": [str(path) for path in merged.removed],
    }


@contextmanager
def no_collector() -> Iterator[None]:
    """Pause the garbage collector: records form no cycles; a scan takes a third of the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _write(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        # Otherwise Python flushes stdout again at exit and prints the error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(READER_LEFT) from None
