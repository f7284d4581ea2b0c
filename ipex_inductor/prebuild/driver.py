"""Triton's extension module for CUDA's driver, built on a machine without that driver.

Triton builds it in every new folder, by a C compiler, before the first kernel is loaded. Here it is
linked to an empty library of the driver's name.
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
FOLDERS = ("triton", "triton/0")  # names that Inductor uses below a graph's folder
DRIVER = "libcuda.so.1"


class NoModuleError(Exception):
    """The reason why the module is not built here; it is then built where the GPU is."""


def files() -> Mapping[str, bytes]:
    """Return the module under all names that Triton may look for below a graph's folder.

    Raises `NoModuleError`.
    """
    modules = _build_modules()
    if isinstance(modules, str):
        raise NoModuleError(modules)
    return {f"{folder}/{name}": data for folder in FOLDERS for name, data in modules.items()}


@functools.cache
def _build_modules() -> Mapping[str, bytes] | str:
    """Return the module's files by name, or the reason why they cannot be built."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return "no C compiler was found"
    with tempfile.TemporaryDirectory() as folder:
        try:
            for linkage in LINKAGES:
                _build(compiler, linkage, Path(folder))
        except (AttributeError, OSError, subprocess.SubprocessError) as error:
            return f"{type(error).__name__}: {error}"
        paths = [path for path in Path(folder).rglob("*") if path.is_file()]
        modules = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
    return modules if len(modules) == len(LINKAGES) else "Triton looks for it under another name"


def _build(compiler: str, linkage: str, folder: Path) -> None:
    """Build the module as Triton does, under its own key, with another linker command."""
    from triton import knobs  # type: ignore[import-untyped]
    from triton.backends.nvidia import driver  # type: ignore[import-untyped]
    from triton.runtime import build  # type: ignore[import-untyped]

    def compile_and_link(name: str, source: str, workdir: str, *_: Any, **__: Any) -> str:
        """Compile `source` and link it to an empty library of the driver's name."""
        module = Path(workdir, name + sysconfig.get_config_var("EXT_SUFFIX"))
        include = Path(driver.__file__).with_name("include"), sysconfig.get_paths()["include"]
        empty = "-x", "c", os.devnull, f"-Wl,-soname,{DRIVER}"
        flags = "-O3", "-Wno-psabi", *(f"-I{path}" for path in include)
        # It must name the driver, though it finds nothing in this one.
        named = "-Wl,--no-as-needed", f"-L{workdir}", f"-l:{DRIVER}"
        for library, rest in ((Path(workdir, DRIVER), empty), (module, (*flags, source, *named))):
            command = [compiler, "-shared", "-fPIC", "-o", str(library), *rest]
            subprocess.run(command, check=True, capture_output=True)
        return str(module)

    system = f"{platform.machine()},{platform.system()},{platform.architecture()[0]},{linkage}"
    with ExitStack() as changes:
        for group in (knobs.cache, knobs.build):
            changes.enter_context(group.scope())
        knobs.cache.dir, knobs.build.impl = str(folder), compile_and_link
        changes.enter_context(mock.patch.object(driver, "library_dirs", list))
        changes.enter_context(mock.patch.object(build, "platform_key", return_value=system))
        with suppress(ImportError, RuntimeError):  # there is no driver to be loaded with it
            driver.CudaUtils.__init__(object.__new__(driver.CudaUtils))
