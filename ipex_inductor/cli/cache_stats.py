"""`ipex-inductor cache stats`: how much there is."""

from collections import Counter

from ipex_inductor.aot_cache import use
from ipex_inductor.aot_cache.survey import survey
from ipex_inductor.autotune.words import plain
from ipex_inductor.cli.autotune_shared import AsJson, say, say_json
from ipex_inductor.cli.cache_shared import InFolder, date, opened, readable, size
from ipex_inductor.reporting.listing import Listing, number


def cache_stats(folder: InFolder = None, as_json: AsJson = False) -> None:
    """Entries and bytes, in all and by kind; what was used first and last; what else lies there."""
    at = opened(folder)
    with readable():
        found = list(survey(at))
        left = [*at.files(".tmp"), *at.files(".lock")] if found else []
    entries, held = Counter[str](), Counter[str]()
    for each in found:
        kind = plain(str(each.key.get("kind", "unreadable")))
        entries[kind] += 1
        held[kind] += each.file.size
    used, quota = [each.file.used for each in found], use.quota()
    if as_json:
        kinds = {kind: {"entries": n, "bytes": held[kind]} for kind, n in sorted(entries.items())}
        facts = {"path": str(at.path), "entries": len(found), "bytes": held.total()}
        span = {"used_first": min(used, default=None), "used_last": max(used, default=None)}
        say_json(facts | span | {"quota": quota, "kinds": kinds, "temporary": len(left)})
        return
    table = Listing("kind", number("entries"), number("size"))
    for kind, count in sorted(entries.items()):
        table.add_row(kind, str(count), size(held[kind]))
    table.add_row("in all", str(len(found)), size(held.total()))
    say(f"{at.path}: {held.total() / quota:.1%} of {size(quota)}", table)
    if used:
        say(f"last used between {date(min(used))} and {date(max(used))}")
    if left:
        say(f"{len(left)} temporary files and locks, of which gc removes what nobody holds")
