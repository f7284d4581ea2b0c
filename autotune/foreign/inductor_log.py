"""Import of Inductor's log of GEMMs, which TORCHINDUCTOR_MM_LOGGING_FILE enables.

It is a JSON list of {"(M, K, N)": [choices], "kernel_type": name}, written by torch's
select_algorithm.py. Torch 2.11 writes no kernel type, and {"invoke": "(M, K, N)"} for every choice
to be made. Batched GEMMs are logged with two sizes only, so they are refused.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ipex_inductor.autotune.foreign.told import UNKNOWN, Parsed, Told, microseconds
from ipex_inductor.autotune.record import (
    Choice,
    Operand,
    Outcome,
    Problem,
    Provenance,
    Record,
    encode,
)
from ipex_inductor.errors import ArgumentError

_LOGGED = {"mm": "aten.mm", "addmm": "aten.addmm", "int_mm": "aten._int_mm"}
_MKN = re.compile(r"\((\d{1,15}), (\d{1,15}), (\d{1,15})\)")


def inductor_mm_log(path: Path, hints: Told, date: str) -> Parsed:
    """Yield a record of each GEMM; raise `ArgumentError` for another kind of file."""
    if not hints.arch or not hints.dtype:
        advice = "Say them: --arch sm_90 --dtype bfloat16."
        raise ArgumentError("an architecture and a dtype", "a log that has neither", advice)
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        entries = error
    if not isinstance(entries, list):
        advice = "Inductor writes it where TORCHINDUCTOR_MM_LOGGING_FILE says."
        raise ArgumentError("a JSON list of matrix products", f"{path}, which is none", advice)
    versions = (hints.device or UNKNOWN, hints.torch or UNKNOWN, UNKNOWN)
    by = Provenance(date, *versions, source="inductor-mm-log")
    for number, entry in enumerate(entries, 1):
        if not (isinstance(entry, dict) and entry.keys() == {"invoke"}):
            for result in _entry(entry, hints, by):
                yield number, result


def _entry(entry: Any, hints: Told, by: Provenance) -> Iterator[Record | str]:
    """Yield the record of an entry, and a reason for each of its choices that is refused."""
    kind = entry.get("kernel_type", hints.op) if isinstance(entry, dict) else None
    sizes = [key for key in entry if key != "kernel_type"] if isinstance(entry, dict) else []
    match = _MKN.fullmatch(sizes[0]) if len(sizes) == 1 else None
    if kind is None and match:
        yield f"torch 2.11 does not say which product {sizes[0]} is; if all are the same: --op mm"
        return
    if kind not in _LOGGED or match is None or not isinstance(entry[sizes[0]], list):
        yield f"{kind!r} of sizes {sizes} is no product that is read here"
        return
    m, k, n = map(int, match.groups())
    times: dict[bytes, tuple[Choice, float]] = {}
    for logged in entry[sizes[0]]:
        parsed = _choice(logged, _LOGGED[kind])
        if isinstance(parsed, str):
            yield parsed
        else:  # library calls are not distinguished: the fastest counts
            name = encode(parsed[0])
            times[name] = min(times.get(name, parsed), parsed, key=lambda timed: timed[1])
    outcomes = tuple(Outcome(choice, reported=time) for choice, time in times.values())
    if outcomes:
        # Strides are not logged and stay empty, so selection never looks this problem up.
        dtype, arch = hints.dtype or "", hints.arch or ""
        operands = (Operand((m, k), (), dtype), Operand((k, n), (), dtype))
        yield Record(Problem(f"{_LOGGED[kind]}.default", operands, arch), outcomes, by)


def _choice(logged: Any, library: str) -> tuple[Choice, float] | str:
    """Return a logged choice and its time in microseconds, or the reason for refusing it."""
    kind = logged.get("type") if isinstance(logged, dict) else None
    if kind not in {"cublas", "triton"}:
        return "a choice that the log does not describe"
    time = microseconds(logged.get("time"))
    if time is None:
        return f"{kind} failed, or has no time: {logged.get('time')!r}"
    if kind == "cublas":
        return Choice("library", library), time
    parameters = {key: value for key, value in logged.items() if key not in {"type", "time"}}
    return Choice("template", "inductor.mm", parameters), time
