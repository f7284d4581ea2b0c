"""`ipex-inductor cache why`: explain why graphs were compiled."""

from rich.text import Text

from ipex_inductor.aot_cache.entry import unpack_any
from ipex_inductor.aot_cache.folder import Folder, RefusedError
from ipex_inductor.aot_cache.graph_files.graphs import KIND
from ipex_inductor.aot_cache.survey import Found, survey
from ipex_inductor.autotune.comparison.words import replace_unprintable
from ipex_inductor.cli.cache.shared import InFolder, date, open_folder, readable
from ipex_inductor.cli.shared import ROWS, AsJson, Everything, say, say_json
from ipex_inductor.reporting.listing import Listing


def cache_why(
    folder: InFolder = None, everything: Everything = False, as_json: AsJson = False
) -> None:
    """Show how each compiled graph differed from the nearest cached one, last used first."""
    cache_dir = open_folder(folder)
    with readable():
        graphs = [entry for entry in survey(cache_dir) if entry.key.get("kind") == KIND]
    shown = graphs if everything or as_json else graphs[:ROWS]
    rows = [(entry, _why(cache_dir, entry)) for entry in shown]
    if as_json:
        say_json({"graphs": [{"entry": entry.file.name, "why": why} for entry, why in rows]})
        return
    table = Listing("entry", "last used", "compiled because")
    for entry, why in rows:
        cells = entry.file.name[:12], date(entry.file.used), why
        table.add_row(*(Text(replace_unprintable(cell)) for cell in cells))
    say(table)
    if len(graphs) > len(shown):
        say(f"and {len(graphs) - len(shown)} more (--all)")


def _why(folder: Folder, entry: Found) -> str:
    """Return the reason that an entry recorded for its compilation, "" for none."""
    try:
        why = unpack_any(folder.load(entry.file.name))[1].meta.get("why", "")
    except (OSError, RefusedError, ValueError) as error:
        return f"unknown: {error}"
    return why if isinstance(why, str) else ""
