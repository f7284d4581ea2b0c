"""`ipex-inductor config`: the options of backend `ipex` as they stand here."""

import json
import os
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from ipex_inductor.config import own_options, resolve

INDUCTOR_KEYS = (
    "torch.compile(options={...}) also takes every key of Inductor, for that call only; "
    "torch._inductor.list_options() lists them."
)


@dataclass(frozen=True)
class Row:
    """One option: its value with the environment applied, and where that value comes from."""

    name: str
    value: Any
    source: str
    accepts: str
    env: str
    doc: str


def rows() -> list[Row]:
    """All our options, in the order of the config; raises `OptionError` for a bad environment."""
    values = resolve(None, None, {})
    return [
        Row(
            name,
            getattr(values, name),
            "environment" if os.environ.get(option.metadata["env"]) else "default",
            option.metadata["accepts"],
            option.metadata["env"],
            option.metadata["doc"],
        )
        for name, option in own_options().items()
    ]


def config(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """The options of backend `ipex`: value in force, where it comes from, what is accepted."""
    found = rows()
    if as_json:
        options = [asdict(row) for row in found]
        typer.echo(json.dumps({"options": options, "inductor": INDUCTOR_KEYS}, indent=2))
        return
    wide = (Column(head, overflow="fold") for head in ("value", "accepts", "what it does"))
    table = Table(Column("option", no_wrap=True), *wide)
    for row in found:
        cells = (f"{row.name}\n{row.env}", f"{row.value!r}\n{row.source}", row.accepts, row.doc)
        table.add_row(*map(Text, cells), end_section=True)
    console = Console()
    console.print(table)
    console.print(Text(INDUCTOR_KEYS))
