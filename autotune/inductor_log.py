"""Inductor's log of matrix products, which TORCHINDUCTOR_MM_LOGGING_FILE turns on.

A JSON list of {"(M, K, N)": [choices], "kernel_type": name}, as torch's select_algorithm.py writes
it. Torch 2.11 writes no kernel type, and {"invoke": "(M, K, N)"} at every choice to be made. Of
batched products there are two sizes only: they are refused.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ipex_inductor.autotune.record import (
    Choice,
    Operand,
    Outcome,
    Problem,
    Provenance,
    Record,
    encode,
)
from ipex_inductor.autotune.told import UNKNOWN, Parsed, Told, microseconds
from ipex_inductor.errors import ArgumentError

_LOGGED = {"mm": "aten.mm", "addmm": "aten.addmm", "int_mm": "aten._int_mm"}
_MKN = re.compile(r"\((\d{1,15}), (\d{1,15}), (\d{1,15})\)")


def inductor_mm_log(path: Path, told: Told, date: str) -> Parsed:
    """A record of each product; raises `ArgumentError` for another kind of file."""
    if not told.arch or not told.dtype:
        todo = "Say them: --arch sm_90 --dtype bfloat16."
        raise ArgumentError("an architecture and a dtype", "a log that has neither", todo)
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        entries = error
    if not isinstance(entries, list):
        todo = "Inductor writes it where TORCHINDUCTOR_MM_LOGGING_FILE says."
        raise ArgumentError("a JSON list of matrix products", f"{path}, which is none", todo)
    versions = (told.device or UNKNOWN, told.torch or UNKNOWN, UNKNOWN)
    by = Provenance(date, *versions, source="inductor-mm-log")
    for number, entry in enumerate(entries, 1):
        if not (isinstance(entry, dict) and entry.keys() == {"invoke"}):
            for made in _entry(entry, told, by):
                yield number, made


def _entry(entry: Any, told: Told, by: Provenance) -> Iterator[Record | str]:
    """One record of an entry, and a reason for each of its choices that has no place in it."""
    kind = entry.get("kernel_type", told.op) if isinstance(entry, dict) else None
    sizes = [key for key in entry if key != "kernel_type"] if isinstance(entry, dict) else []
    found = _MKN.fullmatch(sizes[0]) if len(sizes) == 1 else None
    if kind is None and found:
        yield f"torch 2.11 does not say which product {sizes[0]} is; if all are the same: --op mm"
        return
    if kind not in _LOGGED or found is None or not isinstance(entry[sizes[0]], list):
        yield f"{kind!r} of sizes {sizes} is no product that is read here"
        return
    m, k, n = map(int, found.groups())
    times: dict[bytes, tuple[Choice, float]] = {}
    for logged in entry[sizes[0]]:
        parsed = _choice(logged, _LOGGED[kind])
        if isinstance(parsed, str):
            yield parsed
        else:  # library calls are not told apart: the fastest counts
            name = encode(parsed[0])
            times[name] = min(times.get(name, parsed), parsed, key=lambda each: each[1])
    outcomes = tuple(Outcome(choice, reported=time) for choice, time in times.values())
    if outcomes:
        # Strides are not logged: none are said, which is no problem that is ever looked up.
        dtype, arch = told.dtype or "", told.arch or ""
        operands = (Operand((m, k), (), dtype), Operand((k, n), (), dtype))
        yield Record(Problem(f"{_LOGGED[kind]}.default", operands, arch), outcomes, by)


def _choice(told: Any, library: str) -> tuple[Choice, float] | str:
    kind = told.get("type") if isinstance(told, dict) else None
    if kind not in {"cublas", "triton"}:
        return "a choice that the log does not describe"
    time = microseconds(told.get("time"))
    if time is None:
        return f"{kind} failed, or has no time: {told.get('time')!r}"
    if kind == "cublas":
        return Choice("library", library), time
    parameters = {key: value for key, value in told.items() if key not in {"type", "time"}}
    return Choice("template", "inductor.mm", parameters), time
