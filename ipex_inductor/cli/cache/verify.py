"""`ipex-inductor cache verify`: read every entry whole, or compile it again."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from ipex_inductor.aot_cache.folder import RefusedError
from ipex_inductor.aot_cache.graph_files.comparing import SIGNS
from ipex_inductor.aot_cache.survey import Found, survey
from ipex_inductor.autotune.comparison.words import replace_unprintable
from ipex_inductor.cli.cache.shared import InFolder, open_folder, readable, size
from ipex_inductor.cli.demo.models import Device
from ipex_inductor.cli.model_options import load_model
from ipex_inductor.cli.shared import AsJson, say, say_json
from ipex_inductor.errors import ArgumentError
from ipex_inductor.reporting.listing import Listing, number

CORRUPT, REFUSED, DIFFERENT, NOT_THERE = 1, 2, 4, 8  # bits of the exit code

_RECOMPILE = """Compile this model (as for `explain`: a name, or MODULE:FUNCTION) in spite of its
entries, and compare what torch generates. IPEX_AOT_VERIFY=1 has any program of yours do so."""


def cache_verify(
    recompile: Annotated[str | None, typer.Option(metavar="MODEL", help=_RECOMPILE)] = None,
    folder: InFolder = None,
    as_json: AsJson = False,
) -> None:
    """Read every entry and check its digest, its key, its name and the owner of its file.

    Ends with 0 if all are good, else with the sum of 1 (one is corrupt), 2 (one, or the folder,
    belongs to another user or can be written by others), 4 (a graph of MODEL is generated
    differently from its entry) and 8 (one had no entry, or nothing to compare). What is
    corrupt or others can write is never used.
    """
    if recompile is None:
        code = _read_all(folder, as_json)
    elif folder is None:
        code = _compile_again(recompile, as_json)
    else:
        advice = "Name the home by IPEX_HOME; --folder is for reading."
        raise ArgumentError("--recompile or --folder", "both", advice)
    if code:
        raise typer.Exit(code)


def _read_all(folder: Path | None, as_json: bool) -> int:
    """Verify every entry, print the bad ones, and return the exit code."""
    with readable():
        try:
            entries, why = list(survey(open_folder(folder), whole=True)), ""
        except RefusedError as error:
            entries, why = [], str(error)
    bad = [entry for entry in entries if entry.why]
    code = CORRUPT * any(not entry.refused for entry in bad)
    code |= REFUSED * bool(why or any(entry.refused for entry in bad))
    if as_json:
        good = {"entries": len(entries), "bytes": sum(entry.file.size for entry in entries)}
        say_json(good | {"refused": why, "bad": [_facts(entry) for entry in bad], "code": code})
    else:
        say(
            *(replace_unprintable(f"{entry.file.name}: {entry.why}") for entry in bad),
            *filter(None, [replace_unprintable(why)]),
        )
        held = size(sum(entry.file.size for entry in entries))
        say(f"{len(entries) - len(bad)} of {len(entries)} entries are good ({held})")
    return code


def _compile_again(name: str, as_json: bool) -> int:
    """Run a model once under `IPEX_AOT_VERIFY`, report each graph, and return the exit code."""
    model, inputs = load_model(name, None, 1, Device.CPU)
    os.environ["IPEX_AOT_VERIFY"] = "1"
    import torch

    from ipex_inductor.aot_cache.graph_files.graphs import compared
    from ipex_inductor.reporting import decisions

    with torch.no_grad():
        torch.compile(model, backend="ipex")(*inputs)
    outcomes = [e for r in decisions.reports() for e in r.events if e.kind == "cache"]
    missing = [e.reason for e in outcomes if e.subject not in ("same", "different")]
    if not outcomes:
        missing.append("no graph was looked for in the kernel cache")
    code = DIFFERENT * any(graph.differing for graph in compared)
    code |= NOT_THERE * bool(missing)
    if as_json:
        say_json(
            {"compared": [asdict(graph) for graph in compared], "missing": missing} | {"code": code}
        )
        return code
    table = Listing("entry", number("sources"), "generated again")
    for graph in compared:
        why = "\n".join(graph.differing) or "the same"
        table.add_row(*map(Text, (graph.entry[:12], str(graph.sources), replace_unprintable(why))))
    for why in missing:
        table.add_row("none", "", Text(replace_unprintable(f"not compared: {why}")))
    say(
        table,
        f"compared are {', '.join(SIGNS)} without comments; no two objects or pickles are equal",
    )
    return code


def _facts(entry: Found) -> dict[str, Any]:
    return {"entry": entry.file.name, "why": entry.why, "refused": entry.refused}
