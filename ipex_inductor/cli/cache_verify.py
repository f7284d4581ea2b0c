"""`ipex-inductor cache verify`: every entry, read whole."""

from typing import Any

import typer

from ipex_inductor.aot_cache.folder import RefusedError
from ipex_inductor.aot_cache.survey import Found, survey
from ipex_inductor.autotune.words import plain
from ipex_inductor.cli.autotune_shared import AsJson, say, say_json
from ipex_inductor.cli.cache_shared import InFolder, opened, readable, size

CORRUPT, REFUSED = 1, 2  # bits of the exit code


def cache_verify(folder: InFolder = None, as_json: AsJson = False) -> None:
    """Read every entry and compare its digest, its key and its name; whose file is it?

    Ends with 0 if all are good, else with the sum of 1 (one is corrupt) and 2 (one, or the folder,
    belongs to somebody else or can be written by others). None of these is ever used.
    """
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
    if code:
        raise typer.Exit(code)


def _facts(found: Found) -> dict[str, Any]:
    return {"entry": found.file.name, "why": found.why, "refused": found.refused}
