"""Intel's SYCL as installed by pip: its library, its headers and its version."""

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
# Options that the compiler needs, by soname: without it 8 looks for a library that no wheel has.
OPTIONS = {"libsycl.so.8": ("-fno-sycl-device-lib=all",)}


@dataclass(frozen=True)
class Runtime:
    """An installed SYCL: `library` is its libsycl, `cpu` the CPU's driver, if installed."""

    version: str
    library: Path
    cpu: Path | None
    cpu_version: str = ""

    @property
    def soname(self) -> str:
        """Return the library's name for the loader: `libsycl.so.9`."""
        return self.library.name

    @property
    def options(self) -> tuple[str, ...]:
        """Return the options that the compiler always needs."""
        return OPTIONS.get(self.soname, ())

    @property
    def include(self) -> Path:
        """Return the folder of the headers, which the wheel puts beside its libraries."""
        return self.library.parents[1] / "include"

    @property
    def key_name(self) -> str:
        """Return the name in cache keys."""
        return f"{self.soname} of {RUNTIME} {self.version}"


@functools.cache
def runtime() -> Runtime:
    """Return the installed SYCL. Raises `SyclAbsentError`."""
    package = _find_package(RUNTIME, r"libsycl\.so\.\d+")
    if package is None:
        raise SyclAbsentError(f"the package {RUNTIME}", "none installed", f"{INSTALL}.")
    version, library = package
    if library is None:
        remedy = f"pip install --force-reinstall {RUNTIME}=={version}"
        raise SyclAbsentError("SYCL's library", f"{RUNTIME} {version} without it", remedy)
    cpu_version, cpu = _find_package(CPU_DRIVER, r"libintelocl\.so") or ("", None)
    return Runtime(version, library, cpu, cpu_version)


def is_installed() -> bool:
    """Return whether SYCL's package is installed, complete or not."""
    return _find_package(RUNTIME, "") is not None


def check_process(installed: Runtime) -> None:
    """Raise `SyclAbsentError` if another SYCL is loaded, as queues would not be shared."""
    for file in list_mapped_files("libsycl.so."):
        soname = ".".join(file.name.split(".")[:3])
        if soname != installed.soname:
            conflict = f"{file} in this process (torch's), and {installed.key_name} installed"
            remedy = f'pip install "{RUNTIME}=={VERSIONS.get(soname, f"the one of {soname}")}"'
            raise SyclAbsentError("one SYCL", conflict, remedy)


def list_mapped_files(prefix: str) -> Iterator[Path]:
    """Yield the files mapped into this process whose names begin with `prefix`."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    files = {Path(fields[5]) for line in lines if len(fields := line.split(maxsplit=5)) == 6}
    yield from (file for file in sorted(files) if file.name.startswith(prefix))


def _find_package(package: str, name: str) -> tuple[str, Path | None] | None:
    """Return the version of a package and its file of that name; None if not installed."""
    try:
        package_files = metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return None
    # `files` would make an object of each of some thousand headers.
    record = re.search(rf"^(.*/{name}),", package_files.read_text("RECORD") or "", re.MULTILINE)
    file = Path(str(package_files.locate_file(record[1]))).resolve() if record else None
    return package_files.version, file if file and file.is_file() else None
