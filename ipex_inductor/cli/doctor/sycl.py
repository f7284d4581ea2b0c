"""Checks of `doctor` for the SYCL runtime, and for the compiler of absent Intel GPUs."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping

from ipex_inductor.cli.doctor.findings import Finding
from ipex_inductor.errors import SyclAbsentError

# Runs in a child process, because a broken runtime can crash its process.
PROGRAM = """
import json
from ipex_inductor.errors import SyclAbsentError
from ipex_inductor.templates.sycl.shim import shim

try:
    print(json.dumps(shim().devices))
except SyclAbsentError as error:
    print(json.dumps([error.came, error.todo]))
"""
PATIENCE = 120  # seconds; g++ compiles the shim the first time


def _sycl() -> Finding:
    from ipex_inductor.templates.sycl import wheels

    try:
        runtime = wheels.runtime()
    except SyclAbsentError as error:
        if wheels.is_installed():
            return "warn", error.came, error.todo
        users = 'Intel GPUs and options={"sycl": "cpu"}'
        return "ok", f"no {wheels.RUNTIME}; only {users} use it", ""
    process = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM], capture_output=True, text=True, timeout=PATIENCE
    )
    if process.returncode:
        message = process.stderr.strip().rpartition("\n")[2] or f"exit status {process.returncode}"
        advice = f"pip install --force-reinstall {wheels.RUNTIME}=={runtime.version}"
        return "warn", f"{runtime.key_name} does not work: {message}", advice
    devices_found = json.loads(process.stdout.splitlines()[-1])
    if devices_found and isinstance(devices_found[0], str):
        actual, advice = devices_found
        return "warn", f"{runtime.key_name}: {actual}", advice
    if not devices_found:
        advice = 'pip install "ipex-inductor[sycl-cpu]" for the CPU; a GPU needs its driver'
        return "warn", f"{runtime.key_name} sees no device", advice
    devices = (f"{d['name']} ({d['type']}, {d['backend']} {d['driver']})" for d in devices_found)
    return "ok", f"{runtime.key_name}: {'; '.join(devices)}", ""


def _ocloc() -> Finding:
    path = shutil.which("ocloc")
    return "ok", path or "not on PATH; only compiling for Intel GPUs ahead of time uses it", ""


SYCL_CHECKS: Mapping[str, Callable[[], Finding]] = {"SYCL": _sycl, "ocloc": _ocloc}
