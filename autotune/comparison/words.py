"""One-line texts of problems, choices and provenance."""

from collections.abc import Iterable
from typing import Any

from ipex_inductor.autotune.record import Choice, Operand, Problem, Provenance

_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}


def problem(value: Problem) -> str:
    """Return the problem in one line.

    For example `aten.mm.default + relu bf16[64x32] bf16[32x16] out_dtype=None on sm_90`.
    """
    epilogue = f" + {value.epilogue}" if value.epilogue else ""
    ranges = [f"{s.name}={s.low}..{s.high}" for s in value.symbols]
    pairs = (*_pairs(value.constants), *_pairs(value.settings))
    parts = [*map(_operand, value.operands), *pairs, *ranges]
    return replace_unprintable(f"{value.op}{epilogue} {' '.join(parts)} on {value.arch}")


def choice(value: Choice) -> str:
    """Return text like `tiled flat=False tile=64x64 warps=2`."""
    return replace_unprintable(" ".join([value.name, *_pairs(value.parameters)]))


def provenance(by: Provenance) -> str:
    """Return text like `measured 2026-11-21T12:00:00Z on NVIDIA H200: torch 2.13.0`.

    The versions of driver, Triton and toolkit follow, if they are known.
    """
    versions = (("driver", by.driver), ("triton", by.triton), ("toolkit", by.toolkit))
    versions_used = [
        f"torch {by.torch}",
        *(f"{name} {version}" for name, version in versions if version),
    ]
    who = f"reported by {by.source}" if by.source else "measured"
    clock = [f"clock {by.clock}"] if by.clock else []
    return replace_unprintable(
        f"{who} {by.date} on {by.device}: {', '.join([*versions_used, *clock])}"
    )


def replace_unprintable(text: str) -> str:
    """Return the text with unprintable characters replaced: they might control a terminal."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def _operand(value: Operand) -> str:
    """Return the operand as text; strides appear only if it is not dense in order."""
    if not value.stride:
        strides = ":?" if value.shape else ""
    elif value.stride == _dense(value.shape):
        strides = ""
    else:
        strides = f":{','.join(map(str, value.stride))}"
    shape = "x".join(map(str, value.shape))
    return f"{_SHORT.get(value.dtype, value.dtype)}[{shape}{strides}]"


def _dense(shape: tuple[Any, ...]) -> tuple[int, ...] | None:
    """Return the strides of a dense tensor; None for dynamic sizes."""
    strides, step = [], 1
    for size in reversed(shape):
        if type(size) is not int:
            return None
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def _pairs(values: dict[str, Any]) -> Iterable[str]:
    """Return `name=value` texts, sorted by name."""
    return (f"{name}={value}" for name, value in sorted(values.items()))
