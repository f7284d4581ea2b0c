"""`ipex-inductor cache why`: why graphs were compiled, and not found."""

from rich.text import Text

from ipex_inductor.aot_cache.entry import unpack_any
from ipex_inductor.aot_cache.folder import Folder, RefusedError
from ipex_inductor.aot_cache.graphs import KIND
from ipex_inductor.aot_cache.survey import Found, survey
from ipex_inductor.autotune.words import plain
from ipex_inductor.cli.autotune_shared import ROWS, AsJson, Everything, say, say_json
from ipex_inductor.cli.cache_shared import InFolder, date, opened, readable
from ipex_inductor.reporting.listing import Listing


def cache_why(
    folder: InFolder = None, everything: Everything = False, as_json: AsJson = False
) -> None:
    """What set each compiled graph apart from the nearest one that was there, last used first."""
    at = opened(folder)
    with readable():
        graphs = [found for found in survey(at) if found.key.get("kind") == KIND]
    shown = graphs if everything or as_json else graphs[:ROWS]
    rows = [(found, _why(at, found)) for found in shown]
    if as_json:
        say_json({"graphs": [{"entry": found.file.name, "why": why} for found, why in rows]})
        return
    table = Listing("entry", "last used", "compiled because")
    for found, why in rows:
        cells = found.file.name[:12], date(found.file.used), why
        table.add_row(*(Text(plain(cell)) for cell in cells))
    say(table)
    if len(graphs) > len(shown):
        say(f"and {len(graphs) - len(shown)} more (--all)")


def _why(folder: Folder, found: Found) -> str:
    try:
        why = unpack_any(folder.load(found.file.name))[1].meta.get("why", "")
    except (OSError, RefusedError, ValueError) as error:
        return f"unknown: {error}"
    return why if isinstance(why, str) else ""
