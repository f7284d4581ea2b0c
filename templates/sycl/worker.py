"""SYCL's source to code, in a process of its own: Intel's compiler may end it, or never end."""

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
# Kernels of a source stay together, though one needs fp64 and another does not, and keep arguments
# that they do not read, which 2025.3 takes from them.
ALWAYS = ("-fsycl-device-code-split=off", "-fno-sycl-dead-args-optimization")
PATIENCE = 120.0  # seconds; a template takes one


@dataclass(frozen=True)
class Compiled:
    """SPIR-V, for all devices, and what one device runs of it, if that was asked for."""

    spirv: bytes
    native: bytes
    log: str  # warnings


def compiled(
    source: Source,
    device: Mapping[str, Any],
    native: bool = True,
    patience: float = PATIENCE,
) -> Compiled:
    """`source` by the compiler for a device like that, as `Shim.devices` describes them.

    `native`: for the device itself too. Raises `SyclCompileError` where the compiler refuses the
    source, crashes, or takes longer than `patience`; `SyclAbsentError`.
    """
    here = wheels.runtime()
    with tempfile.TemporaryDirectory() as folder:
        task = {
            "libsycl": str(here.library),
            "shim": str(shim.written(folder)),
            "cpu": str(here.cpu) if here.cpu else None,
            "device": {"name": device["name"], "backend": device["backend"]},
            "text": source.text,
            "options": (*ALWAYS, *here.options, *source.options),
            "native": " ".join(source.native) if native else None,
        }
        _run(source, folder, json.dumps(task), patience)
        said = json.loads(Path(folder, "said.json").read_text())
        if said["error"]:
            raise _refused(source, said["error"].splitlines(), f"{said['error']}\n{said['log']}")
        made = {name: Path(folder, name).read_bytes() for name in ("spirv", "native")[: 1 + native]}
        return Compiled(made["spirv"], made.get("native", b""), said["log"])


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
        came = f"none after {patience:g} seconds"
        raise _error(source, came, "It was ended.", str(error.stderr or "")) from None
    if done.returncode:
        crashed = done.returncode < 0
        how = signal.Signals(-done.returncode).name if crashed else f"status {done.returncode}"
        todo = "The process was its own." if crashed else done.stderr.strip().rpartition("\n")[2]
        raise _error(source, f"an end of the compiler by {how}", todo, done.stderr)


def _refused(source: Source, lines: list[str], log: str) -> SyclCompileError:
    said = next((line.strip() for line in lines if "error" in line), lines[0])
    return _error(source, said, "The log has the rest.", log)


def _error(source: Source, came: str, todo: str, log: str) -> SyclCompileError:
    return SyclCompileError(f"code of {source.named}", came, todo, log)
