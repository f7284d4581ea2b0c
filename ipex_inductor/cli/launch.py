"""`ipex-inductor launch`: run instances of a program, each pinned to its own cores."""

import typer

from ipex_inductor.cpu.launch import main

# The launcher reads its own options, as `python -m ipex_inductor.launch` and `ipexrun` do.
launch = typer.Typer(add_completion=False)


@launch.command(
    "launch",
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
def _launch(context: typer.Context) -> None:
    main(context.args)
