"""What `doctor` says of SYCL, and of the compiler for Intel GPUs that are not here."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping

from ipex_inductor.cli.findings import Finding
from ipex_inductor.errors import SyclAbsentError

# In a child, because a broken runtime takes the process with it.
PROGRAM = """
import json
from ipex_inductor.errors import SyclAbsentError
from ipex_inductor.templates.sycl.shim import shim

try:
    print(json.dumps(shim().devices))
except SyclAbsentError as error:
    print(json.dumps([error.came, error.todo]))
"""
PATIENCE = 120  # seconds: the first time g++ is at work


def _sycl() -> Finding:
    from ipex_inductor.templates.sycl import wheels

    try:
        here = wheels.runtime()
    except SyclAbsentError as error:
        if wheels.is_installed():
            return "warn", error.came, error.todo
        wanted = 'Intel GPUs and options={"sycl": "cpu"}'
        return "ok", f"no {wheels.RUNTIME}; only {wanted} use it", ""
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM], capture_output=True, text=True, timeout=PATIENCE
    )
    if done.returncode:
        said = done.stderr.strip().rpartition("\n")[2] or f"exit status {done.returncode}"
        todo = f"pip install --force-reinstall {wheels.RUNTIME}=={here.version}"
        return "warn", f"{here.named} does not work: {said}", todo
    found = json.loads(done.stdout.splitlines()[-1])
    if found and isinstance(found[0], str):
        came, todo = found
        return "warn", f"{here.named}: {came}", todo
    if not found:
        todo = 'pip install "ipex-inductor[sycl-cpu]" for the CPU; a GPU needs its driver'
        return "warn", f"{here.named} sees no device", todo
    devices = (f"{d['name']} ({d['type']}, {d['backend']} {d['driver']})" for d in found)
    return "ok", f"{here.named}: {'; '.join(devices)}", ""


def _ocloc() -> Finding:
    path = shutil.which("ocloc")
    return "ok", path or "not on PATH; only compiling for Intel GPUs ahead of time uses it", ""


SYCL_CHECKS: Mapping[str, Callable[[], Finding]] = {"SYCL": _sycl, "ocloc": _ocloc}
