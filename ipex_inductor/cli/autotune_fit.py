"""`ipex-inductor autotune fit`: the cost model of the records' architecture."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ipex_inductor.aot_cache.home import ensure
from ipex_inductor.autotune.cost import file_name
from ipex_inductor.autotune.database import write_lines
from ipex_inductor.autotune.own import default_folder
from ipex_inductor.autotune.record import encode
from ipex_inductor.cli.autotune_shared import (
    AsJson,
    Databases,
    listing,
    number,
    records,
    say,
    say_json,
    say_refused,
)
from ipex_inductor.errors import ArgumentError
from ipex_inductor.lowerings import spaces  # noqa: F401  what records may name


def autotune_fit(
    databases: Databases,
    into: Annotated[
        Path | None,
        typer.Option(help="The folder of the model. Default: ours, the only one that is used."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Fit the model that ranks what is to be measured.

    It says how good the model is on problems that it was not fitted on, a tenth at a time.
    """
    from ipex_inductor.autotune.fitting import fit

    read = records(*databases)
    model, quality = fit(read)
    say_refused(read)
    folder = into or default_folder()
    if into is None and not (found := ensure(folder)).usable:
        raise ArgumentError("a home that only you can write", found.reason, "Name one by --into.")
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / file_name(model.arch)
    write_lines(file, [encode(model), b"\n"])
    if as_json:
        say_json({"file": str(file), "problems": model.problems, **asdict(quality)})
        return
    lost = listing(
        "measured, of those ranked first", number("slower than the best"), number("worst")
    )
    for count, (mean, worst) in quality.lost.items():
        lost.add_row(str(count), f"{mean:.1%}", f"{worst:.1%}")
    fitted = f"{model.problems} problems of {model.arch}"
    say(lost, f"{fitted}, median error {model.error:.0%} on the others: {file}")
