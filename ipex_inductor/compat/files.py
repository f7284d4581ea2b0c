"""Files of Inductor and Triton: their folders, loaded kernels, and cached answers of g++."""

import contextlib
import copyreg
import os
import threading
from collections.abc import Callable, Iterator, MutableMapping
from pathlib import Path
from typing import Any

import torch

from ipex_inductor.compat import versions

Answers = Callable[[], MutableMapping[str, bool]]
_compiling: list[tuple[Path, Answers]] = []  # in order of their start; the last one is in force
_outside: dict[str, Any] = {}  # the state before the first of them
_compiling_lock = threading.Lock()


def named_folder() -> str | None:
    """Return the folder that the user named for Inductor's files, by environment or by option.

    Importing Dynamo writes torch's own default into the environment; it does not count as the
    user's.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    with _compiling_lock:
        named = _outside["folder"] if _compiling else os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if named is None or os.path.abspath(named) == os.path.abspath(default_cache_dir()):
        return None
    return named


@contextlib.contextmanager
def cache_folder(path: Path, answers: Answers) -> Iterator[None]:
    """Send Inductor's and Triton's files to `path` meanwhile, also from compile workers.

    This is done by the environment: torch reads it each time and hands it to its workers with each
    task. A Triton folder that the user named stays. C++ kernels that other compilations have loaded
    are not seen, nor do they see ours, or neither folder would be complete. Whether compiler and
    CPU support AVX2, AVX-512, AMX ... is answered from `answers`; Inductor would build and load a
    library for each in every process. A missing answer is computed and stored; code that compiles
    for a CPU with more features is not tried again for one with fewer.

    Memory formats are pickled by their names. Without that pickle searches all modules for one that
    has torch, so keys of Inductor's cache depend on the order of a process's imports.

    Args:
        path: the folder of the files.
        answers: returns the mapping of questions to answers, which grows.
    """
    compilation = path, answers
    with _compiling_lock:
        if not _compiling:
            _remember()
        _compiling.append(compilation)
        _switch()
    try:
        yield
    finally:
        with _compiling_lock:
            _compiling.remove(compilation)
            _switch()


_loaded: dict[Any, dict[Any, Any]] = {}  # C++ kernels loaded inside `cache_folder`, as Inductor's


def _remember() -> None:
    """Save the state that `cache_folder` replaces, and replace it."""
    from torch._inductor.codecache import CppCodeCache
    from torch._inductor.cpu_vec_isa import VecISA

    kinds = [kind for kind in _and_below(CppCodeCache) if "cache" in vars(kind)]
    _outside["loaded"] = {kind: vars(kind)["cache"] for kind in kinds}
    for kind in _outside["loaded"]:
        kind.cache = _loaded.setdefault(kind, {})
    _outside["folder"] = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    _outside["triton"] = os.environ.get("TRITON_CACHE_DIR")
    _outside["check_build"] = check_build = VecISA.check_build

    def check(isa: Any, code: str) -> bool:
        results = _compiling[-1][1]() if _compiling else {}
        key, *stronger_keys = _questions(isa, code)
        if key not in results:
            results[key] = any(map(results.get, stronger_keys)) or check_build(isa, code)
        return results[key]

    vec_isa: Any = VecISA
    vec_isa.check_build = check
    copyreg.pickle(torch.memory_format, _reduce_memory_format)


def _reduce_memory_format(value: torch.memory_format) -> tuple[Any, tuple[str]]:
    return _find_memory_format, (str(value).removeprefix("torch."),)


def _find_memory_format(name: str) -> torch.memory_format:
    """Return the memory format of a pickle; called by its name in stored files."""
    found: torch.memory_format = getattr(torch, name)
    return found


def _questions(isa: Any, code: str) -> Iterator[str]:
    """Yield the key of compiling `code` for `isa`, then keys of stronger ISAs that imply it."""
    from torch._inductor import cpu_vec_isa

    name, flags = type(isa).__name__, isa._arch_flags
    yield f"{name} {flags}\n{code}"
    kind = getattr(cpu_vec_isa, name, None)
    if kind is not None and hasattr(kind, "_arch_flags"):  # SVE's have them once they are made
        more = flags.removeprefix(kind._arch_flags)
        yield from (f"{it.__name__} {it._arch_flags}{more}\n{code}" for it in _and_below(kind))


def _switch() -> None:
    """Point to the folder of the newest compilation; restore everything if there is none."""
    from torch._inductor.codecache import CacheBase
    from torch._inductor.cpu_vec_isa import VecISA
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    CacheBase.get_local_cache_path.cache_clear()  # it remembers the folder of its first call
    folder, triton = _outside["folder"], _outside["triton"]
    default = default_cache_dir()
    if _compiling:
        folder = str(_compiling[-1][0])
        if triton is None or Path(triton).is_relative_to(default):  # Inductor sets it for good
            triton = os.path.join(folder, "triton")
    else:
        vec_isa: Any = VecISA
        vec_isa.check_build = _outside["check_build"]
        copyreg.dispatch_table.pop(torch.memory_format, None)
        for kind, cache in _outside["loaded"].items():
            kind.cache = cache
        used_triton = os.path.exists(os.environ.get("TRITON_CACHE_DIR", ""))
        if triton is None and used_triton and versions.torch_minor() < (2, 15):
            # A worker keeps the setting of its last task until another task changes it. So it is
            # set here, as Inductor does as soon as it has a Triton kernel in this process.
            triton = os.path.join(folder or default, "triton", "0")
    named = {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": triton}
    os.environ.update({name: value for name, value in named.items() if value is not None})
    if folder is None:
        os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
    if triton is None:
        os.environ.pop("TRITON_CACHE_DIR", None)


def _and_below(kind: Any) -> Iterator[Any]:
    """Yield a class and all its subclasses."""
    yield kind
    for below in kind.__subclasses__():
        yield from _and_below(below)
