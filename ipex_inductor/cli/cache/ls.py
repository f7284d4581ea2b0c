"""`ipex-inductor cache ls`: list every entry."""

from typing import Any

from rich.text import Text

from ipex_inductor.aot_cache.survey import Found, survey
from ipex_inductor.autotune.comparison.words import replace_unprintable
from ipex_inductor.cli.cache.shared import InFolder, date, open_folder, readable, size
from ipex_inductor.cli.shared import ROWS, AsJson, Everything, say, say_json
from ipex_inductor.reporting.listing import Listing, number


def cache_ls(
    folder: InFolder = None, everything: Everything = False, as_json: AsJson = False
) -> None:
    """List every entry, the last used first. Use is noted hourly; bytes are not verified."""
    with readable():
        entries = list(survey(open_folder(folder)))
    if as_json:
        say_json({"entries": [_facts(entry) for entry in entries]})
        return
    shown = entries if everything else entries[:ROWS]
    heading = "made with, or why it is bad"
    table = Listing("entry", "kind", "for", number("size"), "last used", heading)
    for entry in shown:
        table.add_row(
            *(Text(replace_unprintable(cell)) for cell in (entry.file.name[:12], *_words(entry)))
        )
    say(table)
    if len(entries) > len(shown):
        say(f"and {len(entries) - len(shown)} more (--all)")


def _words(entry: Found) -> tuple[str, ...]:
    names = ("kind", "architecture", "torch", "triton")
    kind, arch, torch, triton = (str(entry.key.get(name, "")) for name in names)
    versions = f"torch {torch}" + f", triton {triton}" * bool(triton)
    return kind, arch, size(entry.file.size), date(entry.file.used), entry.why or versions


def _facts(entry: Found) -> dict[str, Any]:
    return {
        "entry": entry.file.name,
        "bytes": entry.file.size,
        "used": entry.file.used,
        "key": _to_json_value(entry.key),
        "why": entry.why,
    }


def _to_json_value(value: Any) -> Any:
    """Return `value` in JSON's types: bytes as hexadecimal, invalid Unicode replaced."""
    if isinstance(value, dict):
        return {str(_to_json_value(name)): _to_json_value(inner) for name, inner in value.items()}
    if isinstance(value, tuple):
        return [_to_json_value(inner) for inner in value]
    if isinstance(value, bytes):
        return value.hex()
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value
