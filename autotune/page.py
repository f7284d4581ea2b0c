"""A comparison as one page that needs nothing else: a table to sort, plots, every choice.

All text of records is data to the page: it stands in one JSON block, and its script makes text of
it, never markup.
"""

import dataclasses
import importlib
import importlib.util
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ipex_inductor.autotune import words
from ipex_inductor.autotune.compare import Row
from ipex_inductor.autotune.details import Details, Line
from ipex_inductor.autotune.intensity import intensity
from ipex_inductor.autotune.pool import Estimate
from ipex_inductor.errors import MissingPackageError

Sides = tuple[Mapping[bytes, Details], Mapping[bytes, Details]]


def check_plotly() -> None:
    """Raises `MissingPackageError` where a page cannot be made."""
    if importlib.util.find_spec("plotly") is None:
        todo = "pip install ipex-inductor[report]"
        raise MissingPackageError("plotly, which draws the page's plots", "no such package", todo)


def page(rows: Sequence[Row], sides: Sides, title: str, verdict: Iterable[str]) -> str:
    """The page of these rows and their details; `verdict` are the lines that sum it up."""
    check_plotly()
    from jinja2 import Environment, StrictUndefined

    text = Path(__file__).with_name("comparison.html.jinja").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    return environment.from_string(text).render(
        title=title,
        verdict=list(verdict),
        data=_embedded(_facts(rows, sides)),
        plotly=importlib.import_module("plotly.offline").get_plotlyjs(),
    )


def _embedded(facts: Any) -> str:
    """JSON that ends no script block, whatever its strings say."""
    text = msgspec.json.encode(facts).decode()
    return text.replace("<", r"\u003c").replace(">", r"\u003e").replace("&", r"\u0026")


def _facts(rows: Sequence[Row], sides: Sides) -> dict[str, Any]:
    told = [_row(row, [side.get(row.key) for side in sides]) for row in rows]
    points = [point for row in told for point in row["points"]]
    plotted = sum(bool(row["points"]) for row in told)
    return {"rows": told, "roofs": _roofs(points), "unplotted": len(told) - plotted}


def _row(row: Row, sides: list[Details | None]) -> dict[str, Any]:
    problem = row.problem
    ratio = math.exp(row.effect) if row.a and row.b else None
    kind = f"{problem.operands[0].dtype if problem.operands else '-'} on {problem.arch}"
    flops_a_byte = intensity(problem)
    points = (
        _point(name, side, flops_a_byte, kind) for name, side in zip("AB", sides, strict=True)
    )
    return {
        "name": words.problem(problem),
        "verdict": row.verdict.value,
        "a": _estimate(row.a),
        "b": _estimate(row.b),
        "ratio": ratio,
        "band": row.band if ratio and math.isfinite(row.band) else None,
        "points": [point for point in points if point],
        "sides": [_side(side) for side in sides],
    }


def _estimate(best: Estimate | None) -> dict[str, Any] | None:
    return {"choice": words.choice(best.choice), "p50": best.p50} if best else None


def _side(side: Details | None) -> dict[str, Any] | None:
    if side is None:
        return None
    return {
        "lines": [_line(line) for line in side.lines],
        "provenance": [words.provenance(each) for each in side.provenance],
    }


def _line(line: Line) -> dict[str, Any]:
    return dataclasses.asdict(line) | {"choice": words.choice(line.choice)}


def _point(name: str, side: Details | None, flops: float | None, kind: str) -> Any:
    """Where the best choice of a side stands under the roof, if that is known."""
    best = side.lines[0] if side and side.lines[0].best else None
    if best is None or flops is None or not best.rate or not best.bandwidth:
        return None
    # Shares of both peaks and the intensity give the one at which the roof bends.
    return {
        "side": name,
        "kind": kind,
        "intensity": flops,
        "rate": best.rate,
        "ridge": flops * best.bandwidth / best.rate,
    }


def _roofs(points: list[dict[str, Any]]) -> dict[str, float]:
    """Of each dtype and architecture, the intensity at which arithmetic becomes the limit."""
    ridges: dict[str, list[float]] = {}
    for point in points:
        ridges.setdefault(point["kind"], []).append(point["ridge"])
    return {kind: statistics.median(found) for kind, found in sorted(ridges.items())}
