"""Command lines that repeat a run, for the rows of results."""

import shlex
import sys
from collections.abc import Container
from pathlib import Path

BENCHMARKS = Path(__file__).parents[1]


def command_line(leave_out: Container[str] = ()) -> str:
    """Return `python -m benchmarks ...` for the running script and its arguments."""
    script = Path(sys.argv[0]).resolve()
    path = script.relative_to(BENCHMARKS) if script.is_relative_to(BENCHMARKS) else script
    names = [part for part in path.with_suffix("").parts if part != "studies"]
    arguments = [word for word in sys.argv[1:] if word not in leave_out]
    return shlex.join(["python", "-m", "benchmarks", *names, *arguments])
