"""The module by which Triton talks to CUDA's driver, built where that driver is not.

Triton builds it in every new folder, by a C compiler, before the first kernel is loaded. Here it is
linked to a library of the driver's name without anything in it.
"""

import functools
import os
import platform
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from unittest import mock

LINKAGES = ("ELF", "")  # as `platform` has it of a machine with the program `file`, and without
FOLDERS = ("triton", "triton/0")  # of a graph's: as Inductor names them before and after it looks
DRIVER = "libcuda.so.1"


class NoModuleError(Exception):
    """Why it is not built; then it is, where the GPU is."""


def files() -> Mapping[str, bytes]:
    """The module under all names that Triton may look for below a graph's folder.

    Raises `NoModuleError`.
    """
    found = _built()
    if isinstance(found, str):
        raise NoModuleError(found)
    return {f"{folder}/{name}": data for folder in FOLDERS for name, data in found.items()}


@functools.cache
def _built() -> Mapping[str, bytes] | str:
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return "no C compiler is here"
    with tempfile.TemporaryDirectory() as folder:
        try:
            for linkage in LINKAGES:
                _build(compiler, linkage, Path(folder))
        except (AttributeError, OSError, subprocess.SubprocessError) as error:
            return f"{type(error).__name__}: {error}"
        paths = [path for path in Path(folder).rglob("*") if path.is_file()]
        found = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
    return found if len(found) == len(LINKAGES) else "Triton looks for it elsewhere"


def _build(compiler: str, linkage: str, folder: Path) -> None:
    """As Triton does, under its own key, but for the linker."""
    from triton import knobs  # type: ignore[import-untyped]
    from triton.backends.nvidia import driver  # type: ignore[import-untyped]
    from triton.runtime import build  # type: ignore[import-untyped]

    def linked(name: str, source: str, place: str, *_: Any, **__: Any) -> str:
        made = Path(place, name + sysconfig.get_config_var("EXT_SUFFIX"))
        include = Path(driver.__file__).with_name("include"), sysconfig.get_paths()["include"]
        empty = "-x", "c", os.devnull, f"-Wl,-soname,{DRIVER}"
        flags = "-O3", "-Wno-psabi", *(f"-I{each}" for each in include)
        # It must name the driver, though it finds nothing in this one.
        named = "-Wl,--no-as-needed", f"-L{place}", f"-l:{DRIVER}"
        for library, rest in ((Path(place, DRIVER), empty), (made, (*flags, source, *named))):
            command = [compiler, "-shared", "-fPIC", "-o", str(library), *rest]
            subprocess.run(command, check=True, capture_output=True)
        return str(made)

    system = f"{platform.machine()},{platform.system()},{platform.architecture()[0]},{linkage}"
    with ExitStack() as changes:
        for group in (knobs.cache, knobs.build):
            changes.enter_context(group.scope())
        knobs.cache.dir, knobs.build.impl = str(folder), linked
        changes.enter_context(mock.patch.object(driver, "library_dirs", list))
        changes.enter_context(mock.patch.object(build, "platform_key", return_value=system))
        with suppress(ImportError, RuntimeError):  # no driver is here to be loaded with it
            driver.CudaUtils.__init__(object.__new__(driver.CudaUtils))
