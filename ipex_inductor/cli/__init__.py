"""The `ipex-inductor` command: one file a verb, imported when that verb is called."""

import importlib
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ipex_inductor import __version__
from ipex_inductor.errors import IpexError

# Each is the function of the same name in the module of the same name.
VERBS = {
    "bisect": "Which rule, fold or prologue is behind a wrong or a slow result.",
    "config": "The options of backend `ipex`: values in force, where they come from, what they do.",
    "demo": "Compile whole models with backend `ipex`; compare it with Inductor.",
    "doctor": "What this machine has of all that is needed, and what to do about the rest.",
    "explain": "What backend `ipex` does to a model, graph by graph, and why not more.",
}


class _Verbs(TyperGroup):
    """Lists every verb from the table; imports only the one that is called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, listed, rest = super().resolve_command(ctx, args)
        return name, listed and _load(str(name)), rest

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except IpexError as error:
            from rich.console import Console
            from rich.text import Text

            Console(stderr=True).print(Text(f"error: {error}", style="red"), soft_wrap=True)
            raise typer.Exit(2) from None


def _load(verb: str) -> Any:
    module = importlib.import_module(f"ipex_inductor.cli.{verb}")
    alone = typer.Typer(add_completion=False)
    alone.command(verb)(getattr(module, verb))
    return typer.main.get_command(alone)


def _listed() -> None:
    """Stands for a verb in `--help`."""


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"ipex-inductor {__version__}")
        raise typer.Exit


app = typer.Typer(name="ipex-inductor", cls=_Verbs, no_args_is_help=True)
for _verb, _help in VERBS.items():
    app.command(_verb, short_help=_help)(_listed)


@app.callback()
def _main(
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_print_version, help="Print and exit."),
    ] = False,
) -> None:
    """torch.compile backend `ipex`: what it is set to, what it needs, what it does."""
