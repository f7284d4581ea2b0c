"""C++ compilers, their flags, and the tools that torch itself ships."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ipex_inductor.errors import CompilerNotFoundError


def cxx() -> tuple[str | None, ...]:
    """Return the C++ compilers that Inductor tries, in order."""
    from torch._inductor import config

    named = config.cpp.cxx
    return tuple(named) if isinstance(named, (tuple, list)) else (named,)


def cxx_flags() -> tuple[str, ...]:
    """Return the g++ flags for a source that uses torch's own C++."""
    root = Path(torch.__file__).parent
    # The loader resolves the libraries by name: this process has loaded them already.
    linked = f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10"
    return "-std=c++20", f"-I{root / 'include'}", *linked


def compiler_missing(error: BaseException) -> CompilerNotFoundError | None:
    """Return our error for a missing C++ compiler if that made Inductor fail, else None."""
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
    """Return these environment variables without the values that torch itself sets for good.

    Once it compiles, torch points Triton to the ptxas in its own wheel, which torch's version
    identifies.
    """
    ptxas = str(Path(torch.__file__).parent / "bin" / "ptxas")
    ptxas_paths = {
        name: os.path.realpath(str(v)) for name, v in variables.items() if "PTXAS" in name
    }
    torchs_names = {name for name, path in ptxas_paths.items() if path == os.path.realpath(ptxas)}
    return {name: value for name, value in variables.items() if name not in torchs_names}
