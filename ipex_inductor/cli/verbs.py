"""Groups of verbs that import a verb's file when that verb is called."""

import importlib
from collections.abc import Mapping
from typing import Any

import typer
from typer.core import TyperGroup

from ipex_inductor.errors import IpexError


class Verbs(TyperGroup):
    """Group that lists every verb from a table and imports only the one that is called.

    A verb is the function, or the group, of its own name in the module of that name; the names of
    verbs in a nested group carry the group's name as a prefix.
    """

    prefix = ""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that the verb's name stands for in the table."""
        name, listed, rest = super().resolve_command(ctx, args)
        return name, listed and _load(str(name), self.prefix), rest

    def invoke(self, ctx: Any) -> Any:
        """Run the verb; print an error of ours as one line, without a traceback."""
        try:
            return super().invoke(ctx)
        except IpexError as error:
            from rich.console import Console
            from rich.text import Text

            Console(stderr=True).print(Text(f"error: {error}", style="red"), soft_wrap=True)
            raise typer.Exit(2) from None


def table(group: typer.Typer, verbs: Mapping[str, str]) -> None:
    """List these verbs in `group`, each with its line of help."""
    for verb, line in verbs.items():
        group.command(verb, short_help=line)(_show_in_help)


def _load(verb: str, prefix: str) -> Any:
    module = importlib.import_module(f"ipex_inductor.cli.{prefix}{verb}")
    command = getattr(module, f"{prefix}{verb}")
    if isinstance(command, typer.Typer):
        return typer.main.get_command(command)
    single = typer.Typer(add_completion=False)
    single.command(verb)(command)
    return typer.main.get_command(single)


def _show_in_help() -> None:
    """Stand for a verb in `--help`."""
