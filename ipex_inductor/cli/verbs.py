"""Groups of verbs that import a verb's file when that verb is called."""

import importlib
from collections.abc import Mapping
from keyword import iskeyword
from typing import Any

import typer
from typer.core import TyperGroup

from ipex_inductor.errors import IpexError


class Verbs(TyperGroup):
    """Group that lists every verb from a table and imports only the one that is called.

    The verb `ipex-inductor a b` is the function or the group `a_b` of the module `cli.a.b`, or of
    `cli.a.b.b` where `cli.a.b` is a folder. The module of a verb that is a keyword ends with `_`.
    """

    path: tuple[str, ...] = ()  # words of the command in front of the verb

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that the verb's name stands for in the table."""
        name, listed, rest = super().resolve_command(ctx, args)
        return name, listed and _load((*self.path, str(name))), rest

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


def find_verb(path: tuple[str, ...]) -> Any:
    """Import the function or group of the command of these words: `("cache", "trust", "add")`."""
    *groups, verb = (f"{word}_" if iskeyword(word) else word for word in path)
    module = importlib.import_module(".".join(["ipex_inductor.cli", *groups, verb]))
    if hasattr(module, "__path__"):
        module = importlib.import_module(f"{module.__name__}.{verb}")
    return getattr(module, "_".join(path))


def _load(path: tuple[str, ...]) -> Any:
    """Return the Click command of these words."""
    command = find_verb(path)
    if isinstance(command, typer.Typer):
        return typer.main.get_command(command)
    single = typer.Typer(add_completion=False)
    single.command(path[-1])(command)
    return typer.main.get_command(single)


def _show_in_help() -> None:
    """Stand for a verb in `--help`."""
