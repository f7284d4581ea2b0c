"""`ipex-inductor autotune regret`: do repeated tunings agree."""

import math
import statistics
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
import typer
from rich.text import Text

from ipex_inductor.autotune import words
from ipex_inductor.autotune.regret import Regret, Row, regret
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
    """Repeated tunings: how often they choose the same, and what it costs where they do not.

    Regret is by what share of time a database's winner is slower than the best choice, both as all
    databases together have it.
    """
    if len(databases) < 2:
        todo = "Name each tuning's database."
        raise ArgumentError("two databases or more", str(len(databases)), todo)
    with no_collector():
        read = [records(each) for each in databases]
        found = regret(read)
        say_refused(*read)
        if not found.rows:
            todo = "Give databases of the same problems and architecture."
            raise ArgumentError("databases that share a problem", "none that does", todo)
        missed = _missed(found, max_regret, min_identical, min_agreement)
        if as_json:
            say_json(_facts(found, list(map(str, databases)), missed))
        else:
            say(*_shown(found, len(found.rows) if everything else ROWS), *missed)
    raise typer.Exit(EXCEEDED if missed else 0)


def _missed(
    found: Regret,
    max_regret: float | None,
    min_identical: float | None,
    min_agreement: float | None,
) -> list[str]:
    """Which of the limits asked for do not hold."""
    missed = []
    if max_regret is not None and found.worst() > max_regret:
        missed.append(f"the worst regret is more than {max_regret:.2%}")
    if min_identical is not None and found.identical() < min_identical:
        missed.append(f"fewer than {min_identical:.1%} of the winners are identical")
    if min_agreement is not None and min(found.agreements()) < min_agreement:
        missed.append(f"two of them agree on less than {min_agreement:.1%} of the problems")
    return missed


def _facts(found: Regret, databases: list[str], missed: list[str]) -> dict[str, Any]:
    return {
        "databases": databases,
        "problems": len(found.rows),
        "alone": found.alone,
        "identical": found.identical(),
        "agreements": found.agreements(),
        "worst": found.worst(),
        "mean": found.mean(),
        "missed": missed,
        "rows": [_fact(row) for row in found.rows],
    }


def _fact(row: Row) -> dict[str, Any]:
    return {
        "problem": msgspec.Raw(row.key),
        "identical": row.identical,
        "best": row.best,
        "winners": row.winners,
        "regrets": row.regrets,
    }


def _shown(found: Regret, count: int) -> Iterator[Any]:
    """Where they differ, and what it comes to."""
    differ = [row for row in found.rows if row.identical < 1.0]
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
    same = len(found.rows) - len(differ)
    yield f"identical winners: {same} of {len(found.rows)} problems ({found.identical():.1%})"
    agreements = found.agreements()
    mean, least = statistics.fmean(agreements), min(agreements)
    yield f"two of them agree on {mean:.1%} of the problems, those that differ most on {least:.1%}"
    yield f"regret: worst {_percent(found.worst())}, mean {_percent(found.mean())}"
    if found.alone:
        yield f"{found.alone} problems have a winner in fewer than two databases: left out"


def _winners(row: Row) -> str:
    """Each winner once, with the regret it costs."""
    costs = {words.choice(w): r for w, r in zip(row.winners, row.regrets, strict=True) if w}
    return "\n".join(f"{name}: {_percent(cost)}" for name, cost in costs.items())


def _percent(share: float | None) -> str:
    if share is None:
        return ""
    return f"{share:.2%}" if math.isfinite(share) else "fails elsewhere"
