"""The `ipex-inductor` command: one file per verb, imported when that verb is called."""

from typing import Annotated

import typer

from ipex_inductor import __version__
from ipex_inductor.cli.verbs import Verbs, table

# Each verb is the function of the same name in the module of the same name.
VERBS = {
    "autotune": "Measured kernel choices: show, compare, merge, import and export them.",
    "bisect": "Find the rule, fold or prologue behind a wrong or a slow result.",
    "cache": "The kernel cache: list, verify and free entries, ship them as signed bundles.",
    "config": "The options of backend `ipex`: values in force, where they come from, what they do.",
    "demo": "Compile whole models with backend `ipex`; compare it with Inductor.",
    "doctor": "Check this machine for all that is needed, and say how to fix the rest.",
    "explain": "Show what backend `ipex` does to a model, graph by graph, and why not more.",
    "llm": "Language models: time decoding, quantize weights.",
    "launch": "Run instances of a program, each on its own cores, with allocator and logs.",
    "prebuild": "Compile a model into a bundle, for processes that compile nothing.",
    "quantize": "Calibrate a model for INT8 within an accuracy budget; write model and report.",
}


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"ipex-inductor {__version__}")
        raise typer.Exit


app = typer.Typer(name="ipex-inductor", cls=Verbs, no_args_is_help=True)
table(app, VERBS)


@app.callback()
def _main(
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_print_version, help="Print and exit."),
    ] = False,
) -> None:
    """torch.compile backend `ipex`: what it is set to, what it needs, what it does."""
