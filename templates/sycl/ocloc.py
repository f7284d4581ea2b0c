"""Native code for Intel's GPUs that are not here, by Intel's offline compiler `ocloc`."""

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
    """What a GPU of that architecture (`xe:12.60`) runs of `spirv`, which was made of `source`.

    Raises `MissingPackageError` without an ocloc on the PATH, `SyclCompileError` where it fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        given, made = Path(folder, "given.spv"), Path(folder, "made")
        given.write_bytes(spirv)
        command = [_ocloc(), "compile", "-spirv_input", "-file", str(given), "-device", _name(arch)]
        command += ["-output", str(made), "-output_no_suffix", "-options", " ".join(source.native)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
        file = made.with_suffix(".bin")
        if done.returncode or not file.exists():
            came = f"status {done.returncode}"
            log = done.stdout + done.stderr
            raise SyclCompileError(f"{source.named} for {arch} by ocloc", came, "See log.", log)
        return file.read_bytes()


@functools.cache
def named() -> str:
    """As keys name it: `ocloc 26.27.39122`. Raises `MissingPackageError`."""
    done = subprocess.run([_ocloc(), "--version"], capture_output=True, text=True)
    return f"ocloc {done.stdout.strip().rpartition(' ')[2]}"


def _ocloc() -> str:
    if found := shutil.which("ocloc"):
        return found
    raise MissingPackageError("ocloc", "none on the PATH", "`make ocloc` unpacks Debian's.")


def _name(arch: str) -> str:
    return next(name for name, known in NAMES.items() if known == arch)
