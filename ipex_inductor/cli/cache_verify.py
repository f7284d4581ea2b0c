"""`ipex-inductor cache verify`: every entry, read whole, or compiled again."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from ipex_inductor.aot_cache.comparing import SIGNS
from ipex_inductor.aot_cache.folder import RefusedError
from ipex_inductor.aot_cache.survey import Found, survey
from ipex_inductor.autotune.words import plain
from ipex_inductor.cli.autotune_shared import AsJson, say, say_json
from ipex_inductor.cli.cache_shared import InFolder, opened, readable, size
from ipex_inductor.cli.demo_models import Device
from ipex_inductor.cli.model_options import load_model
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
    """Read every entry and compare its digest, its key and its name; whose file is it?

    Ends with 0 if all are good, else with the sum of 1 (one is corrupt), 2 (one, or the folder,
    belongs to somebody else or can be written by others), 4 (a graph of MODEL is generated
    otherwise than its entry has it) and 8 (one had no entry, or nothing to compare). What is
    corrupt or others can write is never used.
    """
    if recompile is None:
        code = _read_all(folder, as_json)
    elif folder is None:
        code = _compile_again(recompile, as_json)
    else:
        todo = "Name the home by IPEX_HOME; --folder is for reading."
        raise ArgumentError("--recompile or --folder", "both", todo)
    if code:
        raise typer.Exit(code)


def _read_all(folder: Path | None, as_json: bool) -> int:
    with readable():
        try:
            found, why = list(survey(opened(folder), whole=True)), ""
        except RefusedError as error:
            found, why = [], str(error)
    bad = [each for each in found if each.why]
    code = CORRUPT * any(not each.refused for each in bad)
    code |= REFUSED * bool(why or any(each.refused for each in bad))
    if as_json:
        good = {"entries": len(found), "bytes": sum(each.file.size for each in found)}
        say_json(good | {"refused": why, "bad": [_facts(each) for each in bad], "code": code})
    else:
        say(*(plain(f"{each.file.name}: {each.why}") for each in bad), *filter(None, [plain(why)]))
        held = size(sum(each.file.size for each in found))
        say(f"{len(found) - len(bad)} of {len(found)} entries are good ({held})")
    return code


def _compile_again(name: str, as_json: bool) -> int:
    """Run a model once under `IPEX_AOT_VERIFY`, and tell of each of its graphs."""
    model, inputs = load_model(name, None, 1, Device.CPU)
    os.environ["IPEX_AOT_VERIFY"] = "1"
    import torch

    from ipex_inductor.aot_cache.graphs import compared
    from ipex_inductor.reporting import decisions

    with torch.no_grad():
        torch.compile(model, backend="ipex")(*inputs)
    outcomes = [e for r in decisions.reports() for e in r.events if e.kind == "cache"]
    missing = [e.reason for e in outcomes if e.subject not in ("same", "different")]
    if not outcomes:
        missing.append("no graph was looked for in the kernel cache")
    code = DIFFERENT * any(each.differing for each in compared)
    code |= NOT_THERE * bool(missing)
    if as_json:
        say_json(
            {"compared": [asdict(each) for each in compared], "missing": missing} | {"code": code}
        )
        return code
    table = Listing("entry", number("sources"), "generated again")
    for each in compared:
        why = "\n".join(each.differing) or "the same"
        table.add_row(*map(Text, (each.entry[:12], str(each.sources), plain(why))))
    for why in missing:
        table.add_row("none", "", Text(plain(f"not compared: {why}")))
    say(
        table,
        f"compared are {', '.join(SIGNS)} without comments; no two objects or pickles are equal",
    )
    return code


def _facts(found: Found) -> dict[str, Any]:
    return {"entry": found.file.name, "why": found.why, "refused": found.refused}
