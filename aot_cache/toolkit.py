"""Which C++ compiler is here, as keys name it."""

import functools
import importlib.metadata
import os
import shutil

from ipex_inductor import compat

# The last wheel of oneDNN that shares its threads with torch (OpenMP): later ones are SYCL's.
ONEDNN = "onednn-cpu-gomp"


def compiler() -> str | None:
    """The path of the first of Inductor's compilers that is here."""
    return _path(compat.cxx())


def compiler_named() -> str:
    """That compiler, told by path and size: it is not run for that; "none" if there is none."""
    return _named(compiler())


@functools.cache
def version_of(package: str) -> str:
    """The version of an installed package, "" where it is not."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


@functools.cache
def _path(named: tuple[str | None, ...]) -> str | None:
    found = (shutil.which(name) for name in named if name)
    return next((path for path in found if path), None)


@functools.cache
def _named(path: str | None) -> str:
    if path is None:
        return "none"
    real = os.path.realpath(path)  # not what is run: ccache and clang go by the name they have
    return f"{real}, {os.stat(real).st_size} bytes"
