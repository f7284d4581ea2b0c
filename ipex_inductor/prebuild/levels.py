"""Another level of x86-64 than this CPU's, as Inductor and our passes see it meanwhile.

Nothing of what is compiled runs here, so the level may be higher than this CPU's too.
"""

import functools
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ipex_inductor import compat, graph_files
from ipex_inductor.errors import TargetError
from ipex_inductor.passes import attention, packing
from ipex_inductor.prebuild.changes import Changes
from ipex_inductor.target import Target, as_cpu, level

AVX512, BF16, AMX = "x86-64:avx512", "x86-64:avx512_bf16", "x86-64:amx"
# What Inductor vectorises for, by its own names. It has AMX in templates that packages do not get;
# oneDNN, which has the products, asks the CPU that it runs on.
_VNNI = ("avx2", "avx512", "avx512_vnni")
VECTORS = {
    "x86-64:avx2": ("avx2",),
    AVX512: ("avx2", "avx512"),
    BF16: _VNNI,
    AMX: _VNNI,
}
# From where on oneDNN has products of halves.
ONEDNN = {"_is_mkldnn_bf16_supported": AVX512, "_is_mkldnn_fp16_supported": AMX}
REMEMBERING: tuple[Any, ...] = (
    attention.architecture,
    graph_files._vector_checks_of,
    packing.onednn_dtypes,
)


def check(target: Target) -> None:
    """Raise `TargetError` where no code for that CPU can be made here."""
    machine = platform.machine().lower()
    if target.arch not in VECTORS or machine not in ("x86_64", "amd64"):
        todo = f"Levels that x86-64 compiles for: {', '.join(VECTORS)}."
        raise TargetError("a level of x86-64, on x86-64", f"{target} on {machine}", todo)
    if not compat.compiles_for_levels():
        todo = "Package with a newer torch, or on such a CPU."
        raise TargetError("a torch that compiles for other CPUs", compat.VERSION, todo)


@contextmanager
def described(target: Target) -> Iterator[None]:
    """The CPU is of that level for all that is compiled in this thread; see `check`."""
    from torch._inductor import cpu_vec_isa

    check(target)
    onednn, has_bf16 = torch.ops.mkldnn, torch.cpu._is_avx512_bf16_supported

    def at_least(arch: str, real: Callable[[], bool]) -> Callable[[], bool]:
        return real if level(target.arch) >= level(arch) else lambda: False

    with Changes() as changes, as_cpu(target.arch):
        changes.callback(_forget)
        changes.set(cpu_vec_isa, x86_isa_checker=lambda: [*VECTORS[target.arch]])
        # Of their own, as those there are hold whether this CPU has bf16.
        fresh = [type(each)() for each in cpu_vec_isa.supported_vec_isa_list if _is_x86(each)]
        changes.set(cpu_vec_isa, supported_vec_isa_list=fresh)
        changes.set(torch.cpu, _is_avx512_bf16_supported=at_least(BF16, has_bf16))
        for name, least in ONEDNN.items():
            changes.set(onednn, **{name: at_least(least, getattr(onednn, name))})
        _forget()
        yield


def _is_x86(vectors: Any) -> bool:
    return any(name in str(vectors) for name in ("avx", "amx"))


def _forget() -> None:
    """What was remembered of the CPU that is, or that was described."""
    from torch._inductor import cpu_vec_isa

    kinds = {kind for each in cpu_vec_isa.supported_vec_isa_list for kind in type(each).__mro__}
    methods = (method for kind in kinds for method in vars(kind).values())
    for remembering in (*REMEMBERING, cpu_vec_isa.valid_vec_isa_list, *methods):
        if isinstance(remembering, functools._lru_cache_wrapper):
            remembering.cache_clear()
