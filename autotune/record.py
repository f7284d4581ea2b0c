"""What was measured, as values: a problem, the choices for it, and one measurement of all of them.

A record is one JSON object, in canonical form (fields in order, keys sorted) and with nothing that
depends on who wrote it, so that equal records are equal bytes. Types and ranges are checked as it
is read; `space.why_refused` checks what types cannot say.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

Natural = Annotated[int, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]
Name = Annotated[str, Meta(min_length=1, max_length=1000)]
Size = Natural | Name  # a number, or an expression of the problem's symbols: "64*s0"
Constant = bool | int | float | str | tuple[int | float, ...] | None


class Value(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """Base of all that is recorded; never part of a cycle, so the collector need not look."""


class Operand(Value, frozen=True):
    """A tensor that the op takes: sizes and strides in elements, and torch's name of the dtype."""

    shape: tuple[Size, ...]
    stride: tuple[Size, ...]
    dtype: Name


class Symbol(Value, frozen=True):
    """A size that varies, and the sizes it was measured to stand for, both included."""

    name: Name
    low: Natural
    high: Natural


class Problem(Value, frozen=True):
    """What is to be computed, where: all that may decide which kernel is the best.

    `op` is torch's name of it ("aten.addmm.default"), `constants` its arguments that are no
    tensors, and the length of a list of them, `epilogue` what follows it, as an expression, `arch`
    a target's. `settings` are those of the process that the op obeys: threads on a CPU, the
    precision of fp32 products on a GPU.
    """

    op: Name
    operands: tuple[Operand, ...]
    arch: Name
    constants: dict[str, Constant] = {}
    epilogue: str = ""
    symbols: tuple[Symbol, ...] = ()
    settings: dict[str, Constant] = {}


class Choice(Value, frozen=True):
    """One way to compute it: a library call, or a template with parameters and its digest."""

    kind: Literal["library", "template"]
    name: Name
    parameters: dict[str, bool | int | str] = {}
    template: str = ""


class Timing(Value, frozen=True):
    """Microseconds a call took: percentiles of `rounds`, and how far p50 may be off, relatively.

    `noise` is the standard error of p50, as blocks of the rounds show it.
    """

    p20: Positive
    p50: Positive
    p80: Positive
    rounds: Annotated[int, Meta(ge=1)]
    noise: NotNegative


class Outcome(Value, frozen=True):
    """What became of one choice: a timing, after the result was verified; or why there is none.

    `error` is the largest difference from the reference, `tolerance` what was allowed, both in
    units of the reference's largest value. `bandwidth` and `rate` are shares of the peak.
    `reported` is the only word of another tool's: microseconds, not verified, of unknown noise. In
    a record of ours it stands for what was too slow by that to be measured beside the others.
    `predicted` is the same by the word of our cost model.
    """

    choice: Choice
    timing: Timing | None = None
    reason: str = ""
    error: NotNegative | None = None
    tolerance: NotNegative | None = None
    registers: Natural | None = None
    spills: Natural | None = None
    shared_memory: Natural | None = None
    bandwidth: NotNegative | None = None
    rate: NotNegative | None = None
    reported: Positive | None = None
    predicted: Positive | None = None


class Provenance(Value, frozen=True):
    """When and on what it was measured; versions are those that the choices run with.

    `source` is the tool that reported it, "" where we measured.
    """

    date: Annotated[str, Meta(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$")]  # UTC
    device: Name
    torch: Name
    package: Name  # the digest of our sources
    driver: str = ""
    triton: str = ""
    toolkit: str = ""
    clock: str = ""
    source: str = ""


class Record(Value, frozen=True):
    """One measurement of a problem: all its choices, not only the best."""

    problem: Problem
    outcomes: Annotated[tuple[Outcome, ...], Meta(min_length=1)]
    provenance: Provenance


_encoder = msgspec.json.Encoder(order="deterministic")
_decoder = msgspec.json.Decoder(Record)


def encode(value: Any) -> bytes:
    """The canonical JSON of any of these: equal values give equal bytes."""
    return _encoder.encode(value)


def decode(line: bytes) -> Record:
    """The record in `line`. Raises `msgspec.DecodeError` that says what is wrong."""
    return _decoder.decode(line)


def decode_problem(key: bytes) -> Problem:
    """The problem that `encode` made `key` of."""
    return msgspec.json.decode(key, type=Problem)
