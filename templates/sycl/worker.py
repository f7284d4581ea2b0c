"""SYCL source compiled in a separate process: Intel's compiler may end it, or never finish."""

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ipex_inductor.errors import SyclCompileError
from ipex_inductor.templates.sycl import shim, wheels
from ipex_inductor.templates.sycl.source import Source

COMMAND = (sys.executable, "-P", "-m", "ipex_inductor.templates.sycl.child")
# Kernels of a source stay in one module, though one may need fp64 and another not. They keep unread
# arguments, which 2025.3 would remove.
ALWAYS = ("-fsycl-device-code-split=off", "-fno-sycl-dead-args-optimization")
PATIENCE = 120.0  # seconds; a template takes one


@dataclass(frozen=True)
class Compiled:
    """SPIR-V, for all devices, and the native code of one device, if requested."""

    spirv: bytes
    native: bytes
    log: str  # warnings


def compile_source(
    source: Source,
    device: Mapping[str, Any],
    native: bool = True,
    patience: float = PATIENCE,
) -> Compiled:
    """Return `source` compiled for a device like `device`, as `Shim.devices` describes it.

    Args:
        source: the rendered source.
        device: the facts of the device.
        native: compile for the device itself too.
        patience: seconds.

    Raises:
        SyclCompileError: if the compiler refuses the source, crashes, or takes longer than
            `patience`.
        SyclAbsentError: if SYCL is missing.
    """
    runtime = wheels.runtime()
    with tempfile.TemporaryDirectory() as folder:
        task = {
            "libsycl": str(runtime.library),
            "shim": str(shim.write_library(folder)),
            "cpu": str(runtime.cpu) if runtime.cpu else None,
            "device": {"name": device["name"], "backend": device["backend"]},
            "text": source.text,
            "options": (*ALWAYS, *runtime.options, *source.options),
            "native": " ".join(source.native) if native else None,
        }
        _run(source, folder, json.dumps(task), patience)
        report = json.loads(Path(folder, "said.json").read_text())
        if report["error"]:
            raise _compile_error(
                source, report["error"].splitlines(), f"{report['error']}\n{report['log']}"
            )
        outputs = {
            name: Path(folder, name).read_bytes() for name in ("spirv", "native")[: 1 + native]
        }
        return Compiled(outputs["spirv"], outputs.get("native", b""), report["log"])


def _run(source: Source, folder: str, task: str, patience: float) -> None:
    try:
        done = subprocess.run(
            [*COMMAND, folder],
            input=task,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=patience,
            start_new_session=True,  # Ctrl-C is the parent's to handle
        )
    except subprocess.TimeoutExpired as error:
        failure = f"none after {patience:g} seconds"
        raise _error(source, failure, "It was ended.", str(error.stderr or "")) from None
    if done.returncode:
        crashed = done.returncode < 0
        ending = signal.Signals(-done.returncode).name if crashed else f"status {done.returncode}"
        remedy = "The process was its own." if crashed else done.stderr.strip().rpartition("\n")[2]
        raise _error(source, f"an end of the compiler by {ending}", remedy, done.stderr)


def _compile_error(source: Source, lines: list[str], log: str) -> SyclCompileError:
    message = next((line.strip() for line in lines if "error" in line), lines[0])
    return _error(source, message, "The log has the rest.", log)


def _error(source: Source, failure: str, remedy: str, log: str) -> SyclCompileError:
    return SyclCompileError(f"code of {source.kernel_names}", failure, remedy, log)
