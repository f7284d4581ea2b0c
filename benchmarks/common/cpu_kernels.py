"""Options, timers and result rows for benchmarks of single CPU kernels."""

import argparse
import datetime
import json
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from common.command import command_line
from ipex_inductor.target.device import current


def make_parser(about: str) -> argparse.ArgumentParser:
    """Return the options that benchmarks of CPU kernels share."""
    parser = argparse.ArgumentParser(description=about.split("\n")[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", default="", help="the cases in whose row this stands")
    parser.add_argument("--json", help="append the rows to this file, one JSON object a line")
    return parser


def time_call(call: Callable[[], object], count: int, wall: bool = False) -> float:
    """Return seconds a call, of processor time or of the clock."""
    clock = time.perf_counter if wall else time.process_time
    begin = clock()
    for _ in range(count):
        call()
    return (clock() - begin) / count


def least_times(
    calls: Mapping[str, Callable[[], object]], usual: str, rounds: int, wall: bool = False
) -> dict[str, float]:
    """Return microseconds a call: minima of interleaved rounds of 2 ms or one call of `usual`."""
    best = dict.fromkeys(calls, math.inf)
    count = max(1, int(2e-3 / time_call(calls[usual], 3, wall)))
    for _ in range(rounds):
        for name, call in calls.items():
            best[name] = min(best[name], time_call(call, count, wall) * 1e6)
    return best


def append_row(row: Mapping[str, Any], options: argparse.Namespace) -> None:
    """Print a row; with --json append it and a description of the run to that file."""
    print(json.dumps(row), flush=True)
    if options.json:
        known = {
            "date": datetime.date.today().isoformat(),
            "torch": torch.__version__,
            "arch": current().arch,
            "threads": options.threads,
            "command": command_line(leave_out=("--json", options.json)),
        }
        with open(options.json, "a") as file:
            file.write(json.dumps({**row, **known}) + "\n")
