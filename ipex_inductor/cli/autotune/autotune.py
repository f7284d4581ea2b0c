"""`ipex-inductor autotune`: the verbs that work on databases of measured kernel choices."""

from typing import Any

import typer

from ipex_inductor.cli.verbs import Verbs, table
from ipex_inductor.errors import ArgumentError

# Each verb is the function `autotune_<verb>` in its own module of this folder.
VERBS = {
    "compact": "Merge a database's files into one; safe while others write to it.",
    "compare": "Compare two databases: what changed, by how much, is it more than noise.",
    "export": "Write the table of winners for selection; equal records give equal bytes.",
    "fit": "Fit the cost model of the records' architecture, and report its quality.",
    "import": "Import records, TunableOp's results or Inductor's log of GEMMs.",
    "merge": "Merge several databases into one file, in any order.",
    "regret": "Compare repeated tunings: do they agree, and what does a difference cost.",
    "run": "Measure the choices of a model's or a list's problems, and keep the records.",
    "show": "Show the measurements of each problem: every choice, the best, when and where.",
}


class _Verbs(Verbs):
    """The group of `autotune` verbs; file errors become an `ArgumentError`."""

    path = ("autotune",)

    def invoke(self, ctx: Any) -> Any:
        """Run the verb; raise `ArgumentError` for a file that cannot be read or written."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # the reader of the output closed it early
            raise
        except OSError as error:
            reason = f"{error.filename}: {error.strerror}" if error.filename else str(error)
            advice = "Check the path, its mode, and the disk."
            raise ArgumentError("files that can be read and written", reason, advice) from None


autotune = typer.Typer(name="autotune", cls=_Verbs, no_args_is_help=True, add_completion=False)
table(autotune, VERBS)


@autotune.callback()
def _autotune() -> None:
    """Databases of measured kernel choices: a file of records, or a folder of such files."""
