"""Where Inductor and Triton keep their files, what is loaded from them, what was asked of g++."""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, MutableMapping
from pathlib import Path
from typing import Any

from ipex_inductor.compat import versions

Answers = Callable[[], MutableMapping[str, bool]]
_compiling: list[tuple[Path, Answers]] = []  # in the order begun; the last one is in force
_outside: dict[str, Any] = {}  # what was there before the first of them
_compiling_lock = threading.Lock()


def named_folder() -> str | None:
    """The folder that the user named for Inductor's files, by environment or around this call.

    Importing Dynamo writes torch's own default into the environment; that is nobody's wish.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    with _compiling_lock:
        named = _outside["folder"] if _compiling else os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if named is None or os.path.abspath(named) == os.path.abspath(default_cache_dir()):
        return None
    return named


@contextlib.contextmanager
def cache_folder(path: Path, answers: Answers) -> Iterator[None]:
    """Inductor's and Triton's files go to `path` meanwhile, those of compile workers too.

    By the environment: it is what torch reads anew each time and hands to its workers with each
    task. A Triton folder that the user named stays. C++ kernels that other compilations have loaded
    are not seen, nor do they see ours, or neither folder would be complete. Whether compiler and
    CPU can do AVX2, AVX-512, AMX ... is answered from `answers`; Inductor would build and load a
    library for each in every process. What is not answered is tried, and becomes an answer; what
    compiles for a CPU that can do more is not tried again for one that can do less.
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
    from torch._inductor.codecache import CppCodeCache
    from torch._inductor.cpu_vec_isa import VecISA

    kinds = [kind for kind in _and_below(CppCodeCache) if "cache" in vars(kind)]
    _outside["loaded"] = {kind: vars(kind)["cache"] for kind in kinds}
    for kind in _outside["loaded"]:
        kind.cache = _loaded.setdefault(kind, {})
    _outside["folder"] = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    _outside["triton"] = os.environ.get("TRITON_CACHE_DIR")
    _outside["check_build"] = tried = VecISA.check_build

    def check(isa: Any, code: str) -> bool:
        known = _compiling[-1][1]() if _compiling else {}
        question, *by_more = _questions(isa, code)
        if question not in known:
            known[question] = any(map(known.get, by_more)) or tried(isa, code)
        return known[question]

    vec_isa: Any = VecISA
    vec_isa.check_build = check


def _questions(isa: Any, code: str) -> Iterator[str]:
    """Whether it compiles that, and, which says so too, whether those do that can do more."""
    from torch._inductor import cpu_vec_isa

    name, flags = type(isa).__name__, isa._arch_flags
    yield f"{name} {flags}\n{code}"
    kind = getattr(cpu_vec_isa, name, None)
    if kind is not None and hasattr(kind, "_arch_flags"):  # SVE's have them once they are made
        more = flags.removeprefix(kind._arch_flags)
        yield from (f"{it.__name__} {it._arch_flags}{more}\n{code}" for it in _and_below(kind))


def _switch() -> None:
    """Point to the compilation begun last; leave all as it was where none goes on."""
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
        for kind, cache in _outside["loaded"].items():
            kind.cache = cache
        used_triton = os.path.exists(os.environ.get("TRITON_CACHE_DIR", ""))
        if triton is None and used_triton and versions.torch_minor() < (2, 15):
            # A worker keeps what the last task said until another says otherwise. So it is said,
            # as Inductor itself does as soon as it has a Triton kernel in this process.
            triton = os.path.join(folder or default, "triton", "0")
    named = {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": triton}
    os.environ.update({name: value for name, value in named.items() if value is not None})
    if folder is None:
        os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
    if triton is None:
        os.environ.pop("TRITON_CACHE_DIR", None)


def _and_below(kind: Any) -> Iterator[Any]:
    """A class and all below it."""
    yield kind
    for below in kind.__subclasses__():
        yield from _and_below(below)
