"""`ipex-inductor autotune regret`: check whether repeated tunings agree."""

import math
import statistics
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
import typer
from rich.text import Text

from ipex_inductor.autotune.comparison import words
from ipex_inductor.autotune.comparison.regret import Regret, Row, regret
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
from ipex_inductor.errors import ArgumentError
from ipex_inductor.reporting.listing import Listing, number

EXCEEDED = 1


def autotune_regret(
    databases: Databases,
    max_regret: Annotated[
        float | None,
        typer.Option(min=0, help="End with 1 if a winner is slower by a larger share."),
    ] = None,
    min_identical: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="End with 1 if all agree on a smaller share of problems."),
    ] = None,
    min_agreement: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="End with 1 if two agree on a smaller share of problems."),
    ] = None,
    everything: Everything = False,
    as_json: AsJson = False,
) -> None:
    """Compare repeated tunings: how often they choose the same kernel, and what a difference costs.

    Regret is the share of time by which a database's winner is slower than the best choice, both
    timed by all databases together.
    """
    if len(databases) < 2:
        advice = "Name each tuning's database."
        raise ArgumentError("two databases or more", str(len(databases)), advice)
    with no_collector():
        read = [records(database) for database in databases]
        result = regret(read)
        say_refused(*read)
        if not result.rows:
            advice = "Give databases of the same problems and architecture."
            raise ArgumentError("databases that share a problem", "none that does", advice)
        missed = _list_exceeded_limits(result, max_regret, min_identical, min_agreement)
        if as_json:
            say_json(_facts(result, list(map(str, databases)), missed))
        else:
            say(*_format_report(result, len(result.rows) if everything else ROWS), *missed)
    raise typer.Exit(EXCEEDED if missed else 0)


def _list_exceeded_limits(
    result: Regret,
    max_regret: float | None,
    min_identical: float | None,
    min_agreement: float | None,
) -> list[str]:
    """Return a message for each given limit that the result exceeds.

    Args:
        result: the regret of the databases.
        max_regret: the largest accepted share of time lost by a winner.
        min_identical: the least accepted share of problems on which all databases agree.
        min_agreement: the least accepted share of problems on which two databases agree.
    """
    exceeded = []
    if max_regret is not None and result.worst() > max_regret:
        exceeded.append(f"the worst regret is more than {max_regret:.2%}")
    if min_identical is not None and result.identical() < min_identical:
        exceeded.append(f"fewer than {min_identical:.1%} of the winners are identical")
    if min_agreement is not None and min(result.agreements()) < min_agreement:
        exceeded.append(f"two of them agree on less than {min_agreement:.1%} of the problems")
    return exceeded


def _facts(result: Regret, databases: list[str], missed: list[str]) -> dict[str, Any]:
    return {
        "databases": databases,
        "problems": len(result.rows),
        "alone": result.alone,
        "identical": result.identical(),
        "agreements": result.agreements(),
        "worst": result.worst(),
        "mean": result.mean(),
        "missed": missed,
        "rows": [_fact(row) for row in result.rows],
    }


def _fact(row: Row) -> dict[str, Any]:
    return {
        "problem": msgspec.Raw(row.key),
        "identical": row.identical,
        "best": row.best,
        "winners": row.winners,
        "regrets": row.regrets,
    }


def _format_report(result: Regret, count: int) -> Iterator[Any]:
    """Yield a table of the problems whose winners differ, then the summary lines."""
    differ = [row for row in result.rows if row.identical < 1.0]
    if differ:
        table = Listing("problem", "winners", number("agree"), number("regret"))
        for row in differ[:count]:
            cells = (words.problem(row.problem), _winners(row))
            figures = (f"{row.identical:.0%}", _percent(row.worst))
            table.add_row(*map(Text, (*cells, *figures)))
        yield table
        if len(differ) > count:
            yield f"and {len(differ) - count} more rows (--all)"
        yield ""
    same = len(result.rows) - len(differ)
    yield f"identical winners: {same} of {len(result.rows)} problems ({result.identical():.1%})"
    agreements = result.agreements()
    mean, least = statistics.fmean(agreements), min(agreements)
    yield f"two of them agree on {mean:.1%} of the problems, those that differ most on {least:.1%}"
    yield f"regret: worst {_percent(result.worst())}, mean {_percent(result.mean())}"
    if result.alone:
        yield f"{result.alone} problems have a winner in fewer than two databases: left out"


def _winners(row: Row) -> str:
    """Return each distinct winner with its regret, one per line."""
    costs = {words.choice(w): r for w, r in zip(row.winners, row.regrets, strict=True) if w}
    return "\n".join(f"{name}: {_percent(cost)}" for name, cost in costs.items())


def _percent(share: float | None) -> str:
    """Return a share as a percentage, "" if unknown."""
    if share is None:
        return ""
    return f"{share:.2%}" if math.isfinite(share) else "fails elsewhere"
