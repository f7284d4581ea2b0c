"""`ipex-inductor cache stats`: summarize the kernel cache."""

from collections import Counter

from ipex_inductor.aot_cache import use
from ipex_inductor.aot_cache.survey import survey
from ipex_inductor.autotune.comparison.words import replace_unprintable
from ipex_inductor.cli.cache.shared import InFolder, date, open_folder, readable, size
from ipex_inductor.cli.shared import AsJson, say, say_json
from ipex_inductor.reporting.listing import Listing, number


def cache_stats(folder: InFolder = None, as_json: AsJson = False) -> None:
    """Count entries and bytes, in all and by kind; show first and last use and temporary files."""
    cache_dir = open_folder(folder)
    with readable():
        entries_found = list(survey(cache_dir))
        temporary = [*cache_dir.files(".tmp"), *cache_dir.files(".lock")] if entries_found else []
    entries, held = Counter[str](), Counter[str]()
    for entry in entries_found:
        kind = replace_unprintable(str(entry.key.get("kind", "unreadable")))
        entries[kind] += 1
        held[kind] += entry.file.size
    use_times, quota = [entry.file.used for entry in entries_found], use.quota()
    if as_json:
        kinds = {kind: {"entries": n, "bytes": held[kind]} for kind, n in sorted(entries.items())}
        facts = {"path": str(cache_dir.path), "entries": len(entries_found), "bytes": held.total()}
        span = {
            "used_first": min(use_times, default=None),
            "used_last": max(use_times, default=None),
        }
        say_json(facts | span | {"quota": quota, "kinds": kinds, "temporary": len(temporary)})
        return
    table = Listing("kind", number("entries"), number("size"))
    for kind, count in sorted(entries.items()):
        table.add_row(kind, str(count), size(held[kind]))
    table.add_row("in all", str(len(entries_found)), size(held.total()))
    say(f"{cache_dir.path}: {held.total() / quota:.1%} of {size(quota)}", table)
    if use_times:
        say(f"last used between {date(min(use_times))} and {date(max(use_times))}")
    if temporary:
        say(f"{len(temporary)} temporary files and locks, of which gc removes what nobody holds")
