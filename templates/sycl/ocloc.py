"""Native code for Intel GPUs that are not installed here, by the offline compiler `ocloc`."""

import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

from ipex_inductor.errors import MissingPackageError, SyclCompileError
from ipex_inductor.templates.sycl.source import Source
from ipex_inductor.templates.sycl.tiles import NAMES

PATIENCE = 300.0  # seconds


def native(source: Source, spirv: bytes, arch: str) -> bytes:
    """Return the native code of `spirv`, built from `source`, for a GPU (`arch`: `xe:12.60`).

    Raises:
        MissingPackageError: if no ocloc is on the PATH.
        SyclCompileError: if ocloc fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        spirv_file, output = Path(folder, "given.spv"), Path(folder, "made")
        spirv_file.write_bytes(spirv)
        command = [_ocloc(), "compile", "-spirv_input", "-file", str(spirv_file)]
        command += ["-device", _name(arch), "-output", str(output), "-output_no_suffix"]
        command += ["-options", " ".join(source.native)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
        file = output.with_suffix(".bin")
        if done.returncode or not file.exists():
            status = f"status {done.returncode}"
            log = done.stdout + done.stderr
            raise SyclCompileError(
                f"{source.kernel_names} for {arch} by ocloc", status, "See log.", log
            )
        return file.read_bytes()


@functools.cache
def compiler_name() -> str:
    """Return ocloc's name in cache keys: `ocloc 26.27.39122`. Raises `MissingPackageError`."""
    done = subprocess.run([_ocloc(), "--version"], capture_output=True, text=True)
    return f"ocloc {done.stdout.strip().rpartition(' ')[2]}"


def _ocloc() -> str:
    if path := shutil.which("ocloc"):
        return path
    raise MissingPackageError("ocloc", "none on the PATH", "`make ocloc` unpacks Debian's.")


def _name(arch: str) -> str:
    return next(name for name, arch_of_name in NAMES.items() if arch_of_name == arch)
