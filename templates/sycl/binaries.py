"""SYCL kernels as entries of the kernel cache: SPIR-V for all devices, native code for each."""

import functools
import hashlib
from collections.abc import Callable, Iterator

from ipex_inductor.aot_cache import default_store, kernels
from ipex_inductor.aot_cache.digest import source_digest
from ipex_inductor.aot_cache.entry import Entry
from ipex_inductor.aot_cache.env_fingerprint import environment
from ipex_inductor.aot_cache.key import Key, Pairs, pairs
from ipex_inductor.templates.sycl import wheels
from ipex_inductor.templates.sycl.source import Source

SPIRV, NATIVE = "spirv", "sycl-native"  # kinds of entries
ANY = "spirv"  # the architecture of code for no architecture in particular
READ = ("CL_CONFIG_", "IGC_", "NEOReadDebugKeys", "SYCL_PROGRAM_")  # variables of device compilers


def spirv(source: Source, build: Callable[[], bytes]) -> Entry:
    """Return the SPIR-V of `source`; one process builds it, and what `build` raises is raised."""
    return kernels.kernel(spirv_key(source), lambda: (source.manifest, build()))


def stored_spirv(source: Source, arch: str) -> Entry | None:
    """Return the cached SPIR-V of `source`, or None.

    For GPUs the SPIR-V may come from any compiler, as in a bundle; otherwise from this machine's.
    """
    key, store = spirv_key(source), default_store.store()
    if arch.startswith("xe:"):
        return next(kernels.by_any_compiler(key), None)
    return store.get(key) if store else None


def stored_native(source: Source, arch: str, driver: str) -> Iterator[Entry]:
    """Yield the cached native code for an architecture.

    Code by this driver's compiler comes first, then, for GPUs, code by any compiler.
    """
    key, store = native_key(source, arch, driver), default_store.store()
    if store is None:
        return
    if arch.startswith("xe:"):
        yield from kernels.by_any_compiler(key)
    elif entry := store.get(key):
        yield entry


def keep_native(source: Source, arch: str, driver: str, code: bytes) -> None:
    """Store native code in the cache, where `stored_native` finds it."""
    if store := default_store.store():
        store.put(native_key(source, arch, driver), source.manifest, code)


def spirv_key(source: Source) -> Key:
    """Return the cache key of the SPIR-V of `source`."""
    return _key(source, SPIRV, ANY, {"sycl": wheels.runtime().version})


def native_key(source: Source, arch: str, compiler: str) -> Key:
    """Return the cache key of the native code of `source`.

    Args:
        source: the rendered source.
        arch: the architecture as targets name it; of a CPU, with its name.
        compiler: the version of a driver, or of ocloc.
    """
    return _key(source, NATIVE, arch, {"device's compiler": compiler})


def _key(source: Source, kind: str, arch: str, toolkit: dict[str, str]) -> Key:
    options = {"options": source.options, "native": source.native}
    return Key(
        kind=kind,
        source=source_digest(),
        tables=(("text", _digest(source.text)),),
        options=pairs(options),
        problem=source.problem or (("kernels", tuple(e.name for e in source.entries)),),
        architecture=arch,
        toolkit=pairs(toolkit),
        triton="",
        torch="",
        environment=_environment(),
    )


def _environment() -> Pairs:
    return tuple(pair for pair in environment() if pair[0].startswith(READ))


@functools.lru_cache(maxsize=256)
def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
