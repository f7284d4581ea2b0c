"""`ipex-inductor autotune show`: list the measurements of each problem."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any

import msgspec
import typer
from rich.table import Column
from rich.text import Text

from ipex_inductor.autotune.comparison import words
from ipex_inductor.autotune.comparison.details import Details, Line, details
from ipex_inductor.cli.shared import (
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
    """List the choices of each problem, the best of them, and when and on what they were measured.

    Times are microseconds: medians of the percentiles over all records. "best" is what selection
    would use; "reported" are times of other tools, which were not verified here, and "predicted"
    times of the cost model. With --winners only that table is printed, the slowest first; bandwidth
    and rate are shares of the device's peak.
    """
    with no_collector():
        read = records(*databases)
        entries = [
            entry
            for entry in details(read).values()
            if problem.casefold() in words.problem(entry.problem).casefold()
        ]
        say_refused(read)
        if as_json:
            say_json({"problems": [_fact(entry) for entry in entries]})
        else:
            format_entries = _winners if winners else _format_problems
            say(*format_entries(entries, len(entries) if everything else ROWS))


def _fact(of: Details) -> dict[str, Any]:
    return {"problem": msgspec.Raw(of.key), "choices": of.lines, "provenance": of.provenance}


def _format_problems(entries: list[Details], count: int) -> Iterator[Any]:
    """Yield the title, table, roofline and provenance of the first `count` problems."""
    for entry in entries[:count]:
        yield Text(words.problem(entry.problem), "bold")
        yield _table(entry.lines)
        yield from _share_of_the_roof(entry.lines)
        yield from map(words.provenance, entry.provenance)
        yield ""
    yield from _left_out(entries, count)


def _winners(entries: list[Details], count: int) -> Iterator[Any]:
    """Yield a table of the best choices, the slowest first."""
    best = [(line, entry) for entry in entries for line in entry.lines if line.best]
    best.sort(key=lambda pair: -(pair[0].p50 or 0))
    choice = Column("the best choice", overflow="fold", min_width=18)
    table = Listing("problem", choice, *map(number, ("p50", "bandwidth", "rate")))
    for line, entry in best[:count]:
        shares = ("" if s is None else f"{s:.0%}" for s in (line.bandwidth, line.rate))
        chosen, took = words.choice(line.choice), _microseconds(line.p50)
        table.add_row(*map(Text, (words.problem(entry.problem), chosen, took, *shares)))
    yield table
    yield from _left_out(best, count)


def _left_out(rows: Sequence[Any], count: int) -> Iterator[str]:
    """Yield a line about the problems that are not shown."""
    if len(rows) > count:
        yield f"and {len(rows) - count} more problems (--all, --problem TEXT)"
    if not rows:
        yield "no problem"


def _share_of_the_roof(lines: Iterable[Line]) -> Iterator[str]:
    """Yield the best choice's shares of the device's peak bandwidth and rate, where known."""
    for best in filter(lambda line: line.best, lines):
        peaks = {"bandwidth": best.bandwidth, "rate": best.rate}
        shares = [f"{share:.0%} of the peak {name}" for name, share in peaks.items() if share]
        if shares:
            yield f"best: {', '.join(shares)}"


def _table(lines: Iterable[Line]) -> Any:
    times = (number(head) for head in ("p20", "p50", "p80", "noise"))
    choice = Column("choice, or why not", overflow="fold", min_width=18)
    table = Listing("", choice, *times, number("error"), number("n"))
    for line in lines:
        words_only = {"reported": line.reported, "predicted": line.predicted}
        unmeasured = next(
            (label_and_time for label_and_time in words_only.items() if label_and_time[1]),
            ("", None),
        )
        mark, p50 = ("best" if line.best else "", line.p50) if line.p50 else unmeasured
        cells = (
            "; ".join([words.choice(line.choice), *map(words.replace_unprintable, line.reasons)]),
            *map(_microseconds, (line.p20, p50, line.p80)),
            "" if line.noise is None else f"{line.noise:.2%}",
            "" if line.error is None else f"{line.error:.1e}",
            str(line.measured),
        )
        table.add_row(Text(mark, "green"), *map(Text, cells))
    return table


def _microseconds(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
