"""`ipex-inductor autotune compare`: two databases side by side."""

import math
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.text import Text

from ipex_inductor.autotune.comparison import words
from ipex_inductor.autotune.comparison.compare import (
    Comparison,
    Exit,
    Row,
    Verdict,
    compare,
    of_any,
)
from ipex_inductor.autotune.comparison.details import details
from ipex_inductor.autotune.comparison.page import page
from ipex_inductor.autotune.database import Records, write_lines
from ipex_inductor.autotune.pool import Estimate
from ipex_inductor.cli.shared import (
    ROWS,
    AsJson,
    Everything,
    no_collector,
    records,
    say,
    say_json,
    say_refused,
)
from ipex_inductor.errors import OptionError
from ipex_inductor.reporting.listing import Listing, number

PAGE_ROWS = 5000  # unless --all
COLORS = {Verdict.SLOWER: "red", Verdict.FAILED: "red", Verdict.FASTER: "green"}
SAID = {
    Exit.NOTHING_WORSE: "nothing is worse in B",
    Exit.REGRESSIONS: "B is worse",
    Exit.NOT_COMPARABLE: "not comparable",
}

Side = Annotated[Path, typer.Argument(help="A file of records, or a folder of such files.")]


def autotune_compare(
    a: Side,
    b: Side,
    cross: Annotated[
        bool, typer.Option("--cross", help="Compare architectures: one in A with one in B.")
    ] = False,
    html: Annotated[
        Path | None, typer.Option(help="Also write one page with plots to this file.")
    ] = None,
    everything: Everything = False,
    as_json: AsJson = False,
) -> None:
    """Compare two databases by problem: same choice, within noise, faster, slower, or one-sided.

    Ends with 0 if nothing is worse in B, 1 if something is slower beyond noise or no longer runs, 2
    if the databases cannot be compared.
    """
    if html is not None and not html.parent.is_dir():
        raise OptionError("--html in a folder that exists", str(html), "Make the folder first.")
    with no_collector():
        sides = records(a), records(b)
        result = compare(*sides, cross=cross)
        say_refused(*sides)
        if html is not None:
            _write_page(html, result, sides, cross, len(result.rows) if everything else PAGE_ROWS)
        if as_json:
            say_json(facts(result))
        else:
            say(*format_comparison(result, len(result.rows) if everything else ROWS))
    raise typer.Exit(result.exit().value)


def _write_page(
    path: Path, result: Comparison, sides: tuple[Records, Records], cross: bool, count: int
) -> None:
    """Write the HTML page for the first `count` rows only: a browser may not hold all of them.

    Args:
        path: the file to write.
        result: the comparison of both sides.
        sides: the records of A and of B.
        cross: whether one architecture is compared with another.
        count: how many rows get a row and details on the page.
    """
    rows = result.rows[:count]
    keys = {row.key for row in rows}
    a, b = (details(map(of_any, side) if cross else side, keys) for side in sides)
    names = [words.replace_unprintable(", ".join(map(str, side.sources))) for side in sides]
    write_lines(path, [page(rows, (a, b), names, result).encode()])


def facts(result: Comparison) -> dict[str, Any]:
    """Return the comparison as plain data.

    `effect` and `band` are logarithms of the ratio of B's time to A's.
    """
    return {
        "verdict": result.exit().name.lower(),
        "reason": result.reason,
        "geometric_mean": result.geometric_mean(),
        "count": {verdict.value: n for verdict, n in result.count().items()},
        "rows": [_fact(row) for row in result.rows],
    }


def format_comparison(result: Comparison, rows: int) -> list[Any]:
    """Return the first rows as a table, the number of rows left out, and the summary lines."""
    table = Listing("problem", "verdict", "A", "B", number("B/A"), number("noise"))
    for row in result.rows[:rows]:
        verdict = Text(row.verdict, COLORS.get(row.verdict, ""))
        cells = (_side(row.a), _side(row.b), *_effect(row))
        table.add_row(Text(words.problem(row.problem)), verdict, *map(Text, cells))
    more = len(result.rows) - rows
    parts = [table, f"and {more} more rows (--all)"] if more > 0 else [table]
    return [*(parts if result.rows else ()), "", *summary(result)]


def summary(result: Comparison) -> list[str]:
    """Return the number of problems per verdict, the geometric mean, and the overall verdict."""
    count, mean = result.count(), result.geometric_mean()
    verdict_counts = ", ".join(
        f"{count[verdict]} {verdict.value}" for verdict in Verdict if count[verdict]
    )
    lines = [f"{len(result.rows)} problems: {verdict_counts}"] if result.rows else []
    lines += [f"B takes {mean:.3f} times as long as A (geometric mean)"] if mean else []
    return [*lines, f"verdict: {SAID[result.exit()]}{f': {result.reason}' * bool(result.reason)}"]


def _side(best: Estimate | None) -> str:
    return f"{words.choice(best.choice)}\n{best.p50:.2f} us" if best else ""


def _effect(row: Row) -> tuple[str, str]:
    if row.a is None or row.b is None:
        return "", ""
    band = f"{math.expm1(row.band):.1%}" if math.isfinite(row.band) else "unknown"
    return f"{math.exp(row.effect):.3f}", band


def _fact(row: Row) -> dict[str, Any]:
    both = row.a is not None and row.b is not None
    return {
        "problem": msgspec.Raw(row.key),
        "verdict": row.verdict.value,
        "a": row.a,
        "b": row.b,
        "effect": row.effect if both else None,
        "band": row.band if both else None,
    }
