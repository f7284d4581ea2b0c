"""Groups of verbs that import a verb's file when that verb is called."""

import importlib
from collections.abc import Mapping
from typing import Any

import typer
from typer.core import TyperGroup

from ipex_inductor.errors import IpexError


class Verbs(TyperGroup):
    """Lists every verb from a table; imports only the one that is called.

    A verb is the function, or the group, of the same name in the module of the same name; those of
    a group inside another carry its name as a prefix.
    """

    prefix = ""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command behind the name that stands for it in the table."""
        name, listed, rest = super().resolve_command(ctx, args)
        return name, listed and _load(str(name), self.prefix), rest

    def invoke(self, ctx: Any) -> Any:
        """Run the verb; an error of ours is a line, without a traceback."""
        try:
            return super().invoke(ctx)
        except IpexError as error:
            from rich.console import Console
            from rich.text import Text

            Console(stderr=True).print(Text(f"error: {error}", style="red"), soft_wrap=True)
            raise typer.Exit(2) from None


def table(group: typer.Typer, verbs: Mapping[str, str]) -> None:
    """List these verbs, each with its line of help."""
    for verb, line in verbs.items():
        group.command(verb, short_help=line)(_listed)


def _load(verb: str, prefix: str) -> Any:
    module = importlib.import_module(f"ipex_inductor.cli.{prefix}{verb}")
    found = getattr(module, f"{prefix}{verb}")
    if isinstance(found, typer.Typer):
        return typer.main.get_command(found)
    alone = typer.Typer(add_completion=False)
    alone.command(verb)(found)
    return typer.main.get_command(alone)


def _listed() -> None:
    """Stands for a verb in `--help`."""
