"""C++ compilers, what they are told, and the tools that torch brings itself."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ipex_inductor.errors import CompilerNotFoundError


def cxx() -> tuple[str | None, ...]:
    """The C++ compilers that Inductor tries, in order."""
    from torch._inductor import config

    named = config.cpp.cxx
    return tuple(named) if isinstance(named, (tuple, list)) else (named,)


def cxx_flags() -> tuple[str, ...]:
    """What g++ must be told for a source that uses torch's own C++."""
    root = Path(torch.__file__).parent
    # The loader finds the libraries by the names of those that this process has loaded.
    linked = f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10"
    return "-std=c++20", f"-I{root / 'include'}", *linked


def compiler_missing(error: BaseException) -> CompilerNotFoundError | None:
    """Our error for a missing C++ compiler when that is what made Inductor fail."""
    from torch._inductor.exc import InvalidCxxCompiler

    inner: BaseException | None = error
    while inner is not None and not isinstance(inner, InvalidCxxCompiler):
        inner = getattr(inner, "inner_exception", None) or inner.__cause__
    if inner is None:
        return None
    return CompilerNotFoundError(
        "a working C++ compiler (g++ or clang++)",
        "none that runs",
        "Install one (`apt-get install g++`, `dnf install gcc-c++`) or set CXX to its path; "
        "`ipex-inductor doctor` checks it.",
    )


def without_torchs_own(variables: Mapping[str, Any]) -> dict[str, Any]:
    """These environment variables but for what torch itself says in them, on the way, for good.

    It names Triton the ptxas in its own wheel once it compiles; its version tells which that is.
    """
    ptxas = str(Path(torch.__file__).parent / "bin" / "ptxas")
    found = {name: os.path.realpath(str(v)) for name, v in variables.items() if "PTXAS" in name}
    own = {name for name, path in found.items() if path == os.path.realpath(ptxas)}
    return {name: value for name, value in variables.items() if name not in own}
