"""Intel's SYCL as pip has installed it: where its library and headers are, and which version."""

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from ipex_inductor.errors import SyclAbsentError

RUNTIME, CPU_DRIVER = "intel-sycl-rt", "intel-opencl-rt"
INSTALL = 'pip install "ipex-inductor[sycl-cpu]", or [sycl] for Intel GPUs alone'
VERSIONS = {"libsycl.so.8": "2025.3.*", "libsycl.so.9": "2026.*"}  # of the runtime, by soname
# What its compiler must be told: the first of these looks for a library that no wheel has.
OPTIONS = {"libsycl.so.8": ("-fno-sycl-device-lib=all",)}


@dataclass(frozen=True)
class Runtime:
    """An installed SYCL: `library` is its libsycl, `cpu` the CPU's driver, if that is there."""

    version: str
    library: Path
    cpu: Path | None
    cpu_version: str = ""

    @property
    def soname(self) -> str:
        """As the loader knows it: `libsycl.so.9`."""
        return self.library.name

    @property
    def options(self) -> tuple[str, ...]:
        """What its compiler must be told always."""
        return OPTIONS.get(self.soname, ())

    @property
    def include(self) -> Path:
        """The headers, which the wheel puts beside its libraries."""
        return self.library.parents[1] / "include"

    @property
    def named(self) -> str:
        """As keys name it."""
        return f"{self.soname} of {RUNTIME} {self.version}"


@functools.cache
def runtime() -> Runtime:
    """What is installed. Raises `SyclAbsentError`."""
    found = _installed(RUNTIME, r"libsycl\.so\.\d+")
    if found is None:
        raise SyclAbsentError(f"the package {RUNTIME}", "none installed", f"{INSTALL}.")
    version, library = found
    if library is None:
        todo = f"pip install --force-reinstall {RUNTIME}=={version}"
        raise SyclAbsentError("SYCL's library", f"{RUNTIME} {version} without it", todo)
    cpu_version, cpu = _installed(CPU_DRIVER, r"libintelocl\.so") or ("", None)
    return Runtime(version, library, cpu, cpu_version)


def is_installed() -> bool:
    """Whether its package is there, whole or not."""
    return _installed(RUNTIME, "") is not None


def check_process(here: Runtime) -> None:
    """Raise `SyclAbsentError` where another SYCL is loaded: neither knows the other's queues."""
    for file in mapped("libsycl.so."):
        soname = ".".join(file.name.split(".")[:3])
        if soname != here.soname:
            came = f"{file} in this process (torch's), and {here.named} installed"
            todo = f'pip install "{RUNTIME}=={VERSIONS.get(soname, f"the one of {soname}")}"'
            raise SyclAbsentError("one SYCL", came, todo)


def mapped(prefix: str) -> Iterator[Path]:
    """The files in this process's memory whose names begin so."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    files = {Path(fields[5]) for line in lines if len(fields := line.split(maxsplit=5)) == 6}
    yield from (file for file in sorted(files) if file.name.startswith(prefix))


def _installed(package: str, name: str) -> tuple[str, Path | None] | None:
    """The version of a package, and its file of that name; None if it is not installed."""
    try:
        installed = metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return None
    # `files` would make an object of each of some thousand headers.
    listed = re.search(rf"^(.*/{name}),", installed.read_text("RECORD") or "", re.MULTILINE)
    file = Path(str(installed.locate_file(listed[1]))).resolve() if listed else None
    return installed.version, file if file and file.is_file() else None
