"""`ipex-inductor config`: list the options of backend `ipex` with their values."""

import json
import os
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer
from rich.console import Console

from ipex_inductor.config import own_options, resolve
from ipex_inductor.reporting.listing import Listing, show

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
    """Return our options, in the order of the config; raise `OptionError` for a bad environment."""
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
    """List the options of backend `ipex`: value in force, its source, and accepted values."""
    options_found = rows()
    if as_json:
        options = [asdict(row) for row in options_found]
        typer.echo(json.dumps({"options": options, "inductor": INDUCTOR_KEYS}, indent=2))
        return
    table = Listing("option", "value", "accepts", "what it does")
    for row in options_found:
        cells = (f"{row.name}\n{row.env}", f"{row.value!r}\n{row.source}", row.accepts, row.doc)
        table.add_row(*cells)
    show(Console(), table, INDUCTOR_KEYS)
