"""Levels of x86-64: what code for all CPUs of one is compiled with, and which of them run it.

A level that is described is what Inductor and our passes see of the CPU meanwhile. Nothing of what
is compiled runs then, so it may be higher than this CPU's, and lower.
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
# Over which Inductor decides how loops are divided, where any number may run them: more than most
# CPUs have cores would make it leave loops undivided, fewer would leave cores idle.
THREADS = 32


@dataclass(frozen=True)
class Level:
    """CPUs that have these instructions at least.

    `vectors`: what Inductor vectorises for, by its own names. It has AMX in templates that are not
    used here; oneDNN, which has the products, asks the CPU that it runs on.
    """

    arch: str
    march: str  # of GCC
    vectors: tuple[str, ...]
    has: frozenset[str]  # by torch's names, `torch.cpu.get_capabilities`

    @property
    def options(self) -> dict[str, Any]:
        """Inductor's, for a graph that any number of threads may run."""
        return {"cpp.march": self.march, "cpp.dynamic_threads": True, "cpp.threads": THREADS}

    @property
    def onednn(self) -> dict[str, bool]:
        """What oneDNN says of products of halves on each such CPU."""
        return {
            "_is_mkldnn_bf16_supported": level(self.arch) >= level("x86-64:avx512"),
            "_is_mkldnn_fp16_supported": level(self.arch) >= level("x86-64:amx"),
        }


LEVELS = {
    each.arch: each
    for each in (
        Level("x86-64:avx2", "x86-64-v3", ("VecAVX2",), _V3),
        Level("x86-64:avx512", "x86-64-v4", ("VecAVX512", "VecAVX2"), _V4),
        Level("x86-64:avx512_bf16", "x86-64-v4", ("VecAVX512VNNI", "VecAVX512", "VecAVX2"), _BF16),
        Level("x86-64:amx", "x86-64-v4", ("VecAVX512VNNI", "VecAVX512", "VecAVX2"), _AMX),
    )
}


def check(target: Target) -> Level:
    """That level; raises `TargetError` where no code for it can be made here."""
    machine = platform.machine().lower()
    if target.arch not in LEVELS or machine not in ("x86_64", "amd64"):
        todo = f"Levels that x86-64 compiles for: {', '.join(LEVELS)}."
        raise TargetError("a level of x86-64, on x86-64", f"{target} on {machine}", todo)
    if not compat.compiles_for_levels():
        todo = "Use a newer torch, or compile on such a CPU."
        raise TargetError("a torch that compiles for other CPUs", compat.VERSION, todo)
    return LEVELS[target.arch]


@contextmanager
def described(level: Level) -> Iterator[None]:
    """The CPU is of that level for all that is compiled in this thread."""
    with as_cpu(level.arch), compat.vectors(level.vectors, level.onednn):
        yield


@contextmanager
def ahead(level: Level) -> Iterator[None]:
    """As `described`, and graphs are looked for, and kept, as those of that level alone."""
    token = _ahead.set(level)
    try:
        with described(level):
            yield
    finally:
        _ahead.reset(token)


def compiled_ahead() -> Level | None:
    """The level that graphs are compiled for `ahead`, in this thread."""
    return _ahead.get()


_ahead: ContextVar[Level | None] = ContextVar("ahead", default=None)


def served() -> tuple[Level, ...]:
    """Those whose code this CPU runs, the highest first; none where torch compiles for none."""
    return _served(architecture()) if compat.compiles_for_levels() else ()


@functools.cache
def _served(arch: str) -> tuple[Level, ...]:
    able = torch.cpu.get_capabilities()  # a hypervisor may hide what all CPUs of a level have
    return tuple(
        each
        for each in reversed(LEVELS.values())
        if runs_on(each.arch, arch) and not any(able.get(name) is False for name in each.has)
    )
