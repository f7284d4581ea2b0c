"""x86-64 ISA levels: how code for all CPUs of a level is compiled, and which levels a CPU runs.

A described level replaces the CPU that Inductor and the passes see. Nothing that is compiled for it
runs meanwhile, so it may be higher or lower than this CPU's.
"""

import functools
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from ipex_inductor import compat
from ipex_inductor.errors import TargetError
from ipex_inductor.target.device import Target, architecture, as_cpu, level, runs_on

_V3 = frozenset({"avx2", "bmi", "bmi2", "f16c", "fma3", "lzcnt"})
_V4 = _V3 | {"avx512_bw", "avx512_cd", "avx512_dq", "avx512_f", "avx512_vl"}
_BF16 = _V4 | {"avx512_bf16", "avx512_vnni"}
_AMX = _BF16 | {"amx_bf16", "amx_int8", "amx_tile"}
# Number of threads that Inductor assumes when it splits loops that any number may run. More than
# the cores of most CPUs would leave loops unsplit; fewer would leave cores idle.
THREADS = 32


@dataclass(frozen=True)
class Level:
    """CPUs that have at least these instructions.

    `vectors` are Inductor's names of the ISAs it vectorizes for. Inductor has AMX only in templates
    that are not used here; oneDNN, which runs the GEMMs, checks the CPU it runs on.
    """

    arch: str
    march: str  # option of GCC
    vectors: tuple[str, ...]
    has: frozenset[str]  # names as in `torch.cpu.get_capabilities`

    @property
    def options(self) -> dict[str, Any]:
        """Return Inductor's options for a graph that any number of threads may run."""
        return {"cpp.march": self.march, "cpp.dynamic_threads": True, "cpp.threads": THREADS}

    @property
    def onednn(self) -> dict[str, bool]:
        """Return what oneDNN supports on every such CPU: GEMMs in bf16 and fp16."""
        return {
            "_is_mkldnn_bf16_supported": level(self.arch) >= level("x86-64:avx512"),
            "_is_mkldnn_fp16_supported": level(self.arch) >= level("x86-64:amx"),
        }


LEVELS = {
    row.arch: row
    for row in (
        Level("x86-64:avx2", "x86-64-v3", ("VecAVX2",), _V3),
        Level("x86-64:avx512", "x86-64-v4", ("VecAVX512", "VecAVX2"), _V4),
        Level("x86-64:avx512_bf16", "x86-64-v4", ("VecAVX512VNNI", "VecAVX512", "VecAVX2"), _BF16),
        Level("x86-64:amx", "x86-64-v4", ("VecAVX512VNNI", "VecAVX512", "VecAVX2"), _AMX),
    )
}


def check(target: Target) -> Level:
    """Return the level of a target.

    Raises:
        TargetError: if no code for it can be compiled here.
    """
    machine = platform.machine().lower()
    if target.arch not in LEVELS or machine not in ("x86_64", "amd64"):
        advice = f"Levels that x86-64 compiles for: {', '.join(LEVELS)}."
        raise TargetError("a level of x86-64, on x86-64", f"{target} on {machine}", advice)
    if not compat.compiles_for_levels():
        advice = "Use a newer torch, or compile on such a CPU."
        raise TargetError("a torch that compiles for other CPUs", compat.VERSION, advice)
    return LEVELS[target.arch]


@contextmanager
def target_level(level: Level) -> Iterator[None]:
    """Let all that this thread compiles inside be compiled for a CPU of that level."""
    with as_cpu(level.arch), compat.vectors(level.vectors, level.onednn):
        yield


@contextmanager
def compile_ahead(level: Level) -> Iterator[None]:
    """Compile for a level as in `target_level`; look up and store graphs under this level only."""
    token = _ahead.set(level)
    try:
        with target_level(level):
            yield
    finally:
        _ahead.reset(token)


def compiled_ahead() -> Level | None:
    """Return the level of `compile_ahead` in this thread, or None."""
    return _ahead.get()


_ahead: ContextVar[Level | None] = ContextVar("ahead", default=None)


def served_levels() -> tuple[Level, ...]:
    """Return the levels whose code this CPU runs, highest first; empty if torch supports none."""
    return _levels_of(architecture()) if compat.compiles_for_levels() else ()


@functools.cache
def _levels_of(arch: str) -> tuple[Level, ...]:
    able = torch.cpu.get_capabilities()  # a hypervisor may hide instructions of a level
    return tuple(
        candidate
        for candidate in reversed(LEVELS.values())
        if runs_on(candidate.arch, arch)
        and not any(able.get(name) is False for name in candidate.has)
    )
