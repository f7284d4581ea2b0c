"""Measurements as values: a problem, its choices, and one measurement of all of them.

A record is one JSON object in canonical form (fields in order, keys sorted) that does not depend on
its writer, so equal records are equal bytes. Reading checks types and ranges; `space.why_refused`
checks the rest.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

Natural = Annotated[int, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]
Name = Annotated[str, Meta(min_length=1, max_length=1000)]
Size = Natural | Name  # an integer, or an expression of symbols: "64*s0"
Constant = bool | int | float | str | tuple[int | float, ...] | None


class Value(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """Base of all recorded values; never part of a cycle, so the garbage collector skips it."""


class Operand(Value, frozen=True):
    """A tensor operand: sizes and strides in elements, and torch's name of the dtype."""

    shape: tuple[Size, ...]
    stride: tuple[Size, ...]
    dtype: Name


class Symbol(Value, frozen=True):
    """A dynamic size, and the inclusive range of sizes that it was measured for."""

    name: Name
    low: Natural
    high: Natural


class Problem(Value, frozen=True):
    """An op on operands on one architecture: everything that may decide which kernel is best.

    `op` is torch's name of it ("aten.addmm.default"). `constants` are its non-tensor arguments, and
    the length of a list of tensors. `epilogue` is the expression that follows the op, `arch` the
    target's architecture. `settings` are process settings that the op obeys: threads on a CPU, the
    precision of fp32 GEMMs on a GPU.
    """

    op: Name
    operands: tuple[Operand, ...]
    arch: Name
    constants: dict[str, Constant] = {}
    epilogue: str = ""
    symbols: tuple[Symbol, ...] = ()
    settings: dict[str, Constant] = {}


class Choice(Value, frozen=True):
    """One way to compute a problem: a library call, or a template with parameters and digest."""

    kind: Literal["library", "template"]
    name: Name
    parameters: dict[str, bool | int | str] = {}
    template: str = ""


class Timing(Value, frozen=True):
    """Percentiles of the microseconds of a call over `rounds`, and the relative error of p50.

    `noise` is the standard error of p50, estimated from blocks of the rounds.
    """

    p20: Positive
    p50: Positive
    p80: Positive
    rounds: Annotated[int, Meta(ge=1)]
    noise: NotNegative


class Outcome(Value, frozen=True):
    """The result of one choice: a timing of a verified result, or the reason for its lack.

    `error` is the largest difference from the reference, `tolerance` the allowed one, both in units
    of the reference's largest value. `bandwidth` and `rate` are shares of the peak. `reported` is a
    time by another tool in microseconds, unverified and of unknown noise; it stands alone. In a
    record of ours it marks a choice that was too slow by that time to be measured with the rest.
    `predicted` marks one that was too slow by our cost model.
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
    """The time and place of a measurement; versions are those that the choices run with.

    `source` is the tool that reported it, "" for our own measurements.
    """

    date: Annotated[str, Meta(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$")]  # UTC
    device: Name
    torch: Name
    package: Name  # digest of this package's sources
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
    """Return the canonical JSON of a value: equal values give equal bytes."""
    return _encoder.encode(value)


def decode(line: bytes) -> Record:
    """Return the record in `line`; raise `msgspec.DecodeError` with the reason if invalid."""
    return _decoder.decode(line)


def decode_problem(key: bytes) -> Problem:
    """Return the problem that `encode` made `key` of."""
    return msgspec.json.decode(key, type=Problem)
