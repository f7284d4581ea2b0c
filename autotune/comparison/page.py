"""A comparison as one self-contained HTML page: a sortable table, plots and all choices.

Text from records is data for the page: it is in one compressed block, and the script inserts it as
text, never as markup.
"""

import base64
import math
import statistics
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ipex_inductor.autotune.comparison import words
from ipex_inductor.autotune.comparison.compare import Comparison, Exit, Row, Verdict
from ipex_inductor.autotune.comparison.details import Details, Line
from ipex_inductor.autotune.intensity import intensity
from ipex_inductor.autotune.pool import Estimate
from ipex_inductor.reporting.html_page import render_page

Sides = tuple[Mapping[bytes, Details], Mapping[bytes, Details]]

# Words of the page for each verdict, and the level of its count (a class of the shared style).
LABELS = {
    Verdict.SAME: ("Same kernel", ""),
    Verdict.NOISE: ("Within noise", ""),
    Verdict.FASTER: ("Faster in B", "good"),
    Verdict.SLOWER: ("Slower in B", "bad"),
    Verdict.ONLY_A: ("Only in A", ""),
    Verdict.ONLY_B: ("Only in B", ""),
    Verdict.FAILED: ("No kernel runs in B", "bad"),
}
CONCLUSIONS = {
    Exit.NOTHING_WORSE: ("B is not slower than A on any problem, beyond noise.", "good"),
    Exit.REGRESSIONS: (
        "B is worse: some problems are slower beyond noise, or no longer run.",
        "bad",
    ),
    Exit.NOT_COMPARABLE: ("A and B cannot be compared", "warn"),
}
DIGITS = 5  # more than any column of the page displays
SHOWN = ("p20", "p50", "p80", "noise", "error", "tolerance", "reported")  # fields of a line


def page(rows: Sequence[Row], sides: Sides, names: Sequence[str], result: Comparison) -> str:
    """Return the page of these rows and their details.

    Args:
        rows: the rows of the comparison to list.
        sides: the details of A and B by the problem's canonical form.
        names: the sources of A and of B.
        result: the whole comparison, which may have more rows.
    """
    verdict, level = CONCLUSIONS[result.exit()]
    facts = {
        "names": names,
        "verdict": f"{verdict}: {result.reason}." if result.reason else verdict,
        "level": level,
        "mean": result.geometric_mean(),
        "total": len(result.rows),
        "listed": len(rows),
        "left_out": len(result.rows) - len(rows),
        "counts": _counts(result),
        "data": _to_script_data(_facts(rows, sides)),
    }
    return render_page(Path(__file__).with_name("comparison.html.jinja"), facts)


def _counts(result: Comparison) -> list[tuple[str, int, str]]:
    """Return the number of problems of each verdict that occurs: (label, count, level)."""
    count = result.count()
    labels = [(*LABELS[verdict], count[verdict]) for verdict in Verdict if count[verdict]]
    return [(label[0].lower() + label[1:], n, level) for label, level, n in labels]


def _to_script_data(facts: Any) -> str:
    """Return JSON, compressed and in base64, which no string in it can turn into markup."""
    return base64.b64encode(zlib.compress(msgspec.json.encode(_round(facts)), 9)).decode()


def _round(facts: Any) -> Any:
    """Return the facts with floats of `DIGITS` significant digits, which keeps the page small."""
    if isinstance(facts, dict):
        return {name: _round(value) for name, value in facts.items()}
    if isinstance(facts, (list, tuple)):
        return [_round(value) for value in facts]
    return float(f"{facts:.{DIGITS}g}") if isinstance(facts, float) else facts


def _facts(rows: Sequence[Row], sides: Sides) -> dict[str, Any]:
    """Return the data of the page."""
    table = [_row(row, [side.get(row.key) for side in sides]) for row in rows]
    points = [point for row in table for point in row["points"]]
    plotted = sum(bool(row["points"]) for row in table)
    return {"rows": table, "roofs": _roofs(points), "unplotted": len(table) - plotted}


def _row(row: Row, sides: list[Details | None]) -> dict[str, Any]:
    """Return the data of one row of the table."""
    problem = row.problem
    ratio = math.exp(row.effect) if row.a and row.b else None
    kind = f"{problem.operands[0].dtype if problem.operands else '-'} on {problem.arch}"
    flops_a_byte = intensity(problem)
    points = (
        _point(name, side, flops_a_byte, kind) for name, side in zip("AB", sides, strict=True)
    )
    return {
        "name": words.problem(problem),
        "verdict": LABELS[row.verdict][0],
        "a": _estimate(row.a),
        "b": _estimate(row.b),
        "ratio": ratio,
        "band": row.band if ratio and math.isfinite(row.band) else None,
        "points": [point for point in points if point],
        "sides": [_side(side) for side in sides],
    }


def _estimate(best: Estimate | None) -> dict[str, Any] | None:
    """Return the name and time of a side's best choice."""
    return {"choice": words.choice(best.choice), "p50": best.p50} if best else None


def _side(side: Details | None) -> dict[str, Any] | None:
    """Return the choices and provenance of one side."""
    if side is None:
        return None
    return {
        "lines": [_line(line) for line in side.lines],
        "provenance": [words.provenance(source) for source in side.provenance],
    }


def _line(line: Line) -> dict[str, Any]:
    """Return the data of one choice."""
    values = {name: getattr(line, name) for name in SHOWN}
    return {
        "choice": words.choice(line.choice),
        "measured": line.measured,
        **({"best": True} if line.best else {}),
        **({"reasons": line.reasons} if line.reasons else {}),
        **{name: value for name, value in values.items() if value is not None},
    }


def _point(name: str, side: Details | None, flops: float | None, kind: str) -> Any:
    """Return the point of a side's best choice in the roofline plot; None if it is not known."""
    best = side.lines[0] if side and side.lines[0].best else None
    if best is None or flops is None or not best.rate or not best.bandwidth:
        return None
    # The ridge of the roofline follows from the shares of both peaks and the intensity.
    return {
        "side": name,
        "kind": kind,
        "intensity": flops,
        "rate": best.rate,
        "ridge": flops * best.bandwidth / best.rate,
    }


def _roofs(points: list[dict[str, Any]]) -> dict[str, float]:
    """Return for each dtype and architecture the intensity where arithmetic becomes the limit."""
    ridges: dict[str, list[float]] = {}
    for point in points:
        ridges.setdefault(point["kind"], []).append(point["ridge"])
    return {kind: statistics.median(values) for kind, values in sorted(ridges.items())}
