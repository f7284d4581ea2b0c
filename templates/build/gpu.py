"""Triton templates compiled for GPUs, present or not: from the kernel cache, or by Triton."""

import functools
import importlib.metadata
import linecache
import tempfile
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ipex_inductor import compat
from ipex_inductor.aot_cache import kernels
from ipex_inductor.aot_cache.digest import source_digest
from ipex_inductor.aot_cache.entry import Entry
from ipex_inductor.aot_cache.env_fingerprint import environment, triton_settings
from ipex_inductor.aot_cache.key import Key, Pairs, pairs
from ipex_inductor.errors import TargetError
from ipex_inductor.target.device import Target

BINARIES = {"cuda": "cubin", "hip": "hsaco"}
NOTHING: Mapping[str, Any] = MappingProxyType({})


def binary(
    source: str,
    name: str,
    target: Target,
    problem: Pairs,
    signature: Mapping[str, str],
    constants: Mapping[str, Any] = NOTHING,
    options: Mapping[str, Any] = NOTHING,
) -> Entry | None:
    """Return the kernel `name` of a Triton module as machine code, with the metadata for a launch.

    The metadata of the entry: `name` of the function, `num_warps`, `shared` (bytes), `signature`.

    Args:
        source: the module's text.
        name: the kernel's name.
        target: the GPU to compile for.
        problem: names the kernel in the cache.
        signature: Triton's type of each argument that is no constant, in order; pointers are
            multiples of 16 bytes.
        constants: the constant arguments.
        options: Triton's options.

    Returns:
        None if Triton is not installed and no cache has the kernel.

    Raises:
        TargetError: for a target that Triton does not compile for.
    """
    kind = BINARIES.get(target.kind)
    if kind is None:
        remedy = "Kernels for a CPU are in C++."
        raise TargetError("a target of CUDA or HIP", str(target), remedy)
    key = Key(
        kind=kind,
        source=source_digest(),
        tables=(),
        options=(*pairs({**constants, **options}), ("kernel", f"{name}({', '.join(signature)})")),
        problem=problem,
        architecture=target.arch,
        toolkit=(),  # Triton brings its own, or the environment names it
        triton=_version(),
        torch="",
        environment=pairs(
            {
                **compat.without_torchs_own(dict(environment(host=False))),
                **dict(triton_settings()),
            }
        ),
    )
    if not _version():
        return next(kernels.by_any_compiler(key), None)

    def build() -> tuple[dict[str, Any], bytes]:
        return _compile_kernel(source, name, target, kind, signature, constants, options)

    return kernels.kernel(key, build)


def _compile_kernel(
    source: str,
    name: str,
    target: Target,
    kind: str,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    options: Mapping[str, Any],
) -> tuple[dict[str, Any], bytes]:
    import triton  # type: ignore[import-untyped]
    from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]
    from triton.compiler import ASTSource  # type: ignore[import-untyped]

    aligned = [["tt.divisibility", 16]]
    with tempfile.TemporaryDirectory() as folder, triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder  # Triton's own cache verifies nothing
        compiled = triton.compile(
            ASTSource(
                _module(source)[name],
                {**signature, **dict.fromkeys(constants, "constexpr")},
                constexprs=dict(constants),
                attrs={(n,): aligned for n, type_ in enumerate(signature.values()) if "*" in type_},
            ),
            target=GPUTarget(target.kind, _arch(target), target.subgroup or 32),
            # By default products and sums are fused, whatever Triton's default becomes.
            options={"enable_fp_fusion": True, **options},
        )
    meta = compiled.metadata
    metadata = {
        "name": meta.name,
        "num_warps": meta.num_warps,
        "shared": meta.shared,
        "signature": list(signature.values()),
    }
    return metadata, compiled.asm[kind]


def _arch(target: Target) -> int | str:
    return int(target.arch.removeprefix("sm_")) if target.kind == "cuda" else target.arch


def _module(source: str) -> dict[str, Any]:
    """Return the names of a module, run; Triton reads functions as text, which it finds here."""
    file = f"<ipex_inductor template {hash(source):x}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    names = {"__name__": file}
    exec(compile(source, file, "exec"), names)
    return names


@functools.cache
def _version() -> str:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return ""
