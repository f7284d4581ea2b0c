"""`ipex-inductor cache ls`: every entry."""

from typing import Any

from rich.text import Text

from ipex_inductor.aot_cache.survey import Found, survey
from ipex_inductor.autotune.words import plain
from ipex_inductor.cli.autotune_shared import ROWS, AsJson, Everything, say, say_json
from ipex_inductor.cli.cache_shared import InFolder, date, opened, readable, size
from ipex_inductor.reporting.listing import Listing, number


def cache_ls(
    folder: InFolder = None, everything: Everything = False, as_json: AsJson = False
) -> None:
    """Every entry, the one used last first. Use is noted once an hour; bytes are not verified."""
    with readable():
        found = list(survey(opened(folder)))
    if as_json:
        say_json({"entries": [_facts(each) for each in found]})
        return
    shown = found if everything else found[:ROWS]
    made = "made with, or why it is bad"
    table = Listing("entry", "kind", "for", number("size"), "last used", made)
    for each in shown:
        table.add_row(*(Text(plain(cell)) for cell in (each.file.name[:12], *_words(each))))
    say(table)
    if len(found) > len(shown):
        say(f"and {len(found) - len(shown)} more (--all)")


def _words(found: Found) -> tuple[str, ...]:
    names = ("kind", "architecture", "torch", "triton")
    kind, arch, torch, triton = (str(found.key.get(name, "")) for name in names)
    made = f"torch {torch}" + f", triton {triton}" * bool(triton)
    return kind, arch, size(found.file.size), date(found.file.used), found.why or made


def _facts(found: Found) -> dict[str, Any]:
    return {
        "entry": found.file.name,
        "bytes": found.file.size,
        "used": found.file.used,
        "key": _plain(found.key),
        "why": found.why,
    }


def _plain(value: Any) -> Any:
    """As JSON has it: bytes in hexadecimal, and text that is no Unicode as far as it goes."""
    if isinstance(value, dict):
        return {str(_plain(name)): _plain(inner) for name, inner in value.items()}
    if isinstance(value, tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, bytes):
        return value.hex()
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value
