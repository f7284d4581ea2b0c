"""The C++ compiler of this machine, as keys name it."""

import functools
import importlib.metadata
import os
import shutil

from ipex_inductor import compat

# The last wheel of oneDNN that shares its threads with torch (OpenMP): later ones are SYCL's.
ONEDNN = "onednn-cpu-gomp"


def compiler() -> str | None:
    """Return the path of the first of Inductor's compilers that is installed, None without any."""
    return _path(compat.cxx())


def compiler_identity() -> str:
    """Return that compiler's path and size, without running it; "none" if there is none."""
    return _describe_compiler(compiler())


@functools.cache
def version_of(package: str) -> str:
    """Return the version of an installed package, "" if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


@functools.cache
def _path(programs: tuple[str | None, ...]) -> str | None:
    """Return the path of the first of these programs that is installed."""
    paths = (shutil.which(name) for name in programs if name)
    return next((path for path in paths if path), None)


@functools.cache
def _describe_compiler(path: str | None) -> str:
    """Return the real path and the size of a compiler as one text, "none" for None."""
    if path is None:
        return "none"
    real = os.path.realpath(
        path
    )  # for identity only: ccache and clang act by the name they are run under
    return f"{real}, {os.stat(real).st_size} bytes"
