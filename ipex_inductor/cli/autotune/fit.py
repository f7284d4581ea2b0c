"""`ipex-inductor autotune fit`: fit the cost models of the records' architecture."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ipex_inductor.aot_cache.cache_root import ensure
from ipex_inductor.autotune import predictor
from ipex_inductor.autotune.cost import file_name
from ipex_inductor.autotune.database import write_lines
from ipex_inductor.autotune.own import default_folder
from ipex_inductor.autotune.predictor import Guesser
from ipex_inductor.autotune.record import encode
from ipex_inductor.cli.shared import AsJson, Databases, records, say, say_json, say_refused
from ipex_inductor.errors import ArgumentError
from ipex_inductor.reporting.listing import Listing, number


def autotune_fit(
    databases: Databases,
    into: Annotated[
        Path | None,
        typer.Option(help="The folder of the model. Default: ours, the only one that is used."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Fit the model that ranks candidates and the one that chooses where nothing is measured.

    Prints how good the first is on problems that it was not fitted on, a tenth at a time, and where
    the second may choose, judged by families of sizes that it was not fitted on.
    """
    from ipex_inductor.autotune import fitting, guess_fitting

    read = records(*databases)
    model, quality = fitting.fit(read)
    guesser, _ = guess_fitting.fit(read)
    say_refused(read)
    folder = into or default_folder()
    if into is None and not (state := ensure(folder)).usable:
        raise ArgumentError("a home that only you can write", state.reason, "Name one by --into.")
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / file_name(model.arch)
    for name, fitted in ((file_name, model), (predictor.file_name, guesser)):
        write_lines(folder / name(model.arch), [encode(fitted), b"\n"])
    if as_json:
        classes = [
            {"op": c.op, "epilogue": c.behind, "templates": len(c.templates), "reason": c.reason}
            for c in guesser.classes
        ]
        facts = {"file": str(file), "problems": model.problems, **asdict(quality)}
        say_json({**facts, "chooses": classes})
        return
    lost = Listing(
        "measured, of those ranked first", number("slower than the best"), number("worst")
    )
    for count, (mean, worst) in quality.lost.items():
        lost.add_row(str(count), f"{mean:.1%}", f"{worst:.1%}")
    summary = (
        f"{model.problems} problems of {model.arch}, median error {model.error:.0%} on the others"
    )
    say(lost, f"{summary}: {file}", _chooses(guesser))


def _chooses(guesser: Guesser) -> Listing:
    """Return a table of the operation classes: the predictor's templates or the library."""
    table = Listing("unmeasured", "gets")
    for op_class in guesser.classes:
        choice_text = (
            f"one of {len(op_class.templates)} templates, if {op_class.margin:.3g} times as fast"
        )
        table.add_row(
            op_class.op + " with an epilogue" * op_class.behind,
            f"the library's: {op_class.reason}" if op_class.reason else choice_text,
        )
    return table
