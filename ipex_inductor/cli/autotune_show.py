"""`ipex-inductor autotune show`: what was measured of each problem."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any

import msgspec
import typer
from rich.table import Column
from rich.text import Text

from ipex_inductor.autotune import words
from ipex_inductor.autotune.details import Details, Line, details
from ipex_inductor.cli.autotune_shared import (
    ROWS,
    AsJson,
    Databases,
    Everything,
    no_collector,
    records,
    say,
    say_json,
    say_refused,
)
from ipex_inductor.reporting.listing import Listing, number


def autotune_show(
    databases: Databases,
    problem: Annotated[
        str, typer.Option(help="Only problems whose line contains this text, in any case.")
    ] = "",
    winners: Annotated[
        bool, typer.Option(help="A line for each: the best, and how near it comes to the peak.")
    ] = False,
    everything: Everything = False,
    as_json: AsJson = False,
) -> None:
    """Of each problem: every choice, the best of them, and when and on what it was measured.

    Times are microseconds: medians of the percentiles over all records. "best" is what selection
    would use; "reported" are times of other tools, which nobody verified here, and "predicted"
    those of the cost model. With --winners there is only that table, the slowest first; bandwidth
    and rate are shares of the device's peak.
    """
    with no_collector():
        read = records(*databases)
        found = [
            each
            for each in details(read).values()
            if problem.casefold() in words.problem(each.problem).casefold()
        ]
        say_refused(read)
        if as_json:
            say_json({"problems": [_fact(each) for each in found]})
        else:
            shown = _winners if winners else _shown
            say(*shown(found, len(found) if everything else ROWS))


def _fact(of: Details) -> dict[str, Any]:
    return {"problem": msgspec.Raw(of.key), "choices": of.lines, "provenance": of.provenance}


def _shown(found: list[Details], count: int) -> Iterator[Any]:
    for each in found[:count]:
        yield Text(words.problem(each.problem), "bold")
        yield _table(each.lines)
        yield from _share_of_the_roof(each.lines)
        yield from map(words.provenance, each.provenance)
        yield ""
    yield from _left_out(found, count)


def _winners(found: list[Details], count: int) -> Iterator[Any]:
    """The slowest first."""
    best = [(line, each) for each in found for line in each.lines if line.best]
    best.sort(key=lambda pair: -(pair[0].p50 or 0))
    choice = Column("the best choice", overflow="fold", min_width=18)
    table = Listing("problem", choice, *map(number, ("p50", "bandwidth", "rate")))
    for line, each in best[:count]:
        shares = ("" if s is None else f"{s:.0%}" for s in (line.bandwidth, line.rate))
        chosen, took = words.choice(line.choice), _microseconds(line.p50)
        table.add_row(*map(Text, (words.problem(each.problem), chosen, took, *shares)))
    yield table
    yield from _left_out(best, count)


def _left_out(found: Sequence[Any], count: int) -> Iterator[str]:
    if len(found) > count:
        yield f"and {len(found) - count} more problems (--all, --problem TEXT)"
    if not found:
        yield "no problem"


def _share_of_the_roof(lines: Iterable[Line]) -> Iterator[str]:
    """How near the best comes to what its device can do at most, where that is known."""
    for best in filter(lambda line: line.best, lines):
        peaks = {"bandwidth": best.bandwidth, "rate": best.rate}
        known = [f"{share:.0%} of the peak {name}" for name, share in peaks.items() if share]
        if known:
            yield f"best: {', '.join(known)}"


def _table(lines: Iterable[Line]) -> Any:
    times = (number(head) for head in ("p20", "p50", "p80", "noise"))
    choice = Column("choice, or why not", overflow="fold", min_width=18)
    table = Listing("", choice, *times, number("error"), number("n"))
    for line in lines:
        words_only = {"reported": line.reported, "predicted": line.predicted}
        told = next((each for each in words_only.items() if each[1]), ("", None))
        mark, p50 = ("best" if line.best else "", line.p50) if line.p50 else told
        cells = (
            "; ".join([words.choice(line.choice), *map(words.plain, line.reasons)]),
            *map(_microseconds, (line.p20, p50, line.p80)),
            "" if line.noise is None else f"{line.noise:.2%}",
            "" if line.error is None else f"{line.error:.1e}",
            str(line.measured),
        )
        table.add_row(Text(mark, "green"), *map(Text, cells))
    return table


def _microseconds(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
