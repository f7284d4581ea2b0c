"""`ipex-inductor doctor`: check this machine, and say what to do about what is missing."""

import importlib
import json
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from glob import glob
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from ipex_inductor.cli.doctor.findings import Finding, Status
from ipex_inductor.cli.doctor.kernel_cache import CACHE_CHECKS
from ipex_inductor.cli.doctor.sycl import SYCL_CHECKS
from ipex_inductor.errors import IpexError
from ipex_inductor.reporting.listing import Listing, show

INSTALL_CXX = (
    "`apt-get install g++` or `dnf install gcc-c++`, or set CXX to the path of a C++ compiler"
)
OPENMP_PROGRAM = """#include <omp.h>
#include <cstdio>
int main() { std::printf("%d", omp_get_max_threads()); }
"""
# Files that show each vendor's driver, whether or not torch can use it.
GPU_TRACES = {
    "NVIDIA": ("/dev/nvidiactl",),
    "AMD": ("/dev/kfd",),
    "Intel": ("/sys/bus/pci/drivers/i915/0000:*", "/sys/bus/pci/drivers/xe/0000:*"),
}
DRIVER_VERSIONS = {
    "cuda": Path("/proc/driver/nvidia/version"),
    "hip": Path("/sys/module/amdgpu/version"),
}


@dataclass(frozen=True)
class Check:
    """One line of the report; `todo` is empty when there is nothing to do."""

    name: str
    status: Status
    detail: str
    todo: str = ""


def _python() -> Finding:
    return "ok", f"{platform.python_version()} ({sys.executable})", ""


def _python_headers() -> Finding:
    header = Path(sysconfig.get_path("include"), "Python.h")
    if header.is_file():
        return "ok", str(header), ""
    advice = "`apt-get install python3-dev` or `dnf install python3-devel` for this Python"
    return "fail", f"{header} is missing; compiled graphs include it", advice


def _torch() -> Finding:
    import torch

    from ipex_inductor import compat

    kinds = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip, "XPU": torch.version.xpu}
    builds = [f"{kind} {version}" for kind, version in kinds.items() if version] or ["CPU"]
    detail = f"{compat.VERSION}, {' + '.join(builds)} build"
    if reason := compat.untested_reason(compat.VERSION):
        advice = 'pip install "torch>=2.11,<2.16"; until then plain Inductor compiles'
        return "warn", f"{detail}; {reason}", advice
    oldest, newest = (".".join(map(str, f(compat.TESTED))) for f in (min, max))
    return "ok", f"{detail}; tested are {oldest} to {newest}", ""


def _triton() -> Finding:
    try:
        version = importlib.import_module("triton").__version__
    except ImportError as error:
        return "warn", f"{error}; no kernels for GPUs", "pip install triton"
    return "ok", version, ""


def _compiler() -> Finding:
    # torch looks for CXX, else for g++ and nothing else.
    cxx = os.environ.get("CXX", "g++")
    if shutil.which(cxx) is None:
        clang = shutil.which("clang++")
        return "fail", f"{cxx!r} not found", f"export CXX={clang}" if clang else INSTALL_CXX
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder, "omp.cpp"), Path(folder, "omp")
        source.write_text(OPENMP_PROGRAM)
        process = _run(cxx, "-fopenmp", str(source), "-o", str(program))
        process = process if process.returncode else _run(str(program))
    if process.returncode:
        message = next(
            (line for line in process.stderr.splitlines() if "error" in line), "no message"
        )
        return "fail", f"{cxx} cannot build an OpenMP program: {message}", INSTALL_CXX
    version = _run(cxx, "--version").stdout.partition("\n")[0]
    return "ok", f"{version}; OpenMP with {process.stdout} threads", ""


def _isa() -> Finding:
    from ipex_inductor.target import device

    target = device.current("cpu")
    return "ok", f"{target.arch}, {target.multiprocessors} cores ({target.name})", ""


def _gpu() -> Finding:
    import torch

    from ipex_inductor import compat

    if gpu_counts := Counter(_gpus(torch)):
        return "ok", "; ".join(f"{count} x {gpu}" for gpu, count in gpu_counts.items()), ""
    traces = [vendor for vendor, paths in GPU_TRACES.items() if any(map(glob, paths))]
    if traces:
        detail = f"a driver for {' and '.join(traces)}, but torch {compat.VERSION} sees no GPU"
        return "warn", detail, "install the torch build for it: https://pytorch.org/get-started"
    return "ok", "none; graphs run on the CPU", ""


def _gpus(torch: Any) -> Iterator[str]:
    from ipex_inductor.target import device

    for kind in ("cuda", "xpu"):
        runtime = getattr(torch, kind)
        for index in range(runtime.device_count()):
            target = device.current(torch.device(kind, index))
            properties = runtime.get_device_properties(index)
            version = getattr(properties, "driver_version", None) or _driver_version(target.kind)
            yield f"{target.name} ({target.arch}, driver {version})"


def _driver_version(kind: str) -> str:
    try:
        match = re.search(r"\d+\.\d[\d.]*", DRIVER_VERSIONS[kind].read_text())
    except OSError:
        match = None
    return match[0] if match else "of unknown version"


def _prebuild() -> Finding:
    from ipex_inductor import compat
    from ipex_inductor.aot_cache import toolkit

    if toolkit.compiler() is None:
        return "warn", "no C++ compiler, which `prebuild --arch` needs once", INSTALL_CXX
    why_not = {kind: compat.why_not_for(kind) for kind in ("cuda", "hip")}
    built = [kind.upper() for kind, reason in why_not.items() if not reason]
    if built:
        return "ok", f"graphs for any GPU of {' and '.join(built)}, by torch {compat.VERSION}", ""
    return "ok", f"kernels only, as a check: {why_not['cuda']}; its CUDA build needs no GPU", ""


def _torch_cache_folder() -> Finding:
    from ipex_inductor.aot_cache import cache_root

    default = Path(_torch_default_folder())
    path = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default)
    state = cache_root.state(path)
    if state.usable:
        location = str(path) if state.exists else f"{path}, made on first use"
        whose = "backend `ipex` has its own" if path == default else "backend `ipex` uses it too"
        return "ok", f"{location}; {whose}", ""
    advice = "chmod 700 it, or set TORCHINDUCTOR_CACHE_DIR to a folder of your own"
    return "warn", f"{state.reason}; torch unpickles what it finds there", advice


def _torch_default_folder() -> str:
    import torch

    # Importing the module would import its parents too, which create the folder.
    file = Path(torch.__file__).parent / "_inductor/runtime/cache_dir_utils.py"
    return str(runpy.run_path(str(file))["default_cache_dir"]())


def _write_watch() -> Finding:
    from ipex_inductor.templates.tensor_reader import write_watch

    if reason := write_watch.why_not():
        slower = (
            "single elements written by raw pointers are found after more calls in large models"
        )
        return "warn", f"not noted by the kernel: {slower}", reason
    return "ok", "noted by the kernel (userfaultfd)", ""


def _entry_point() -> Finding:
    entry_points = [
        e.value for e in metadata.entry_points(group="torch_dynamo_backends", name="ipex")
    ]
    if not entry_points:
        advice = "pip install ipex-inductor, or `pip install -e .` in a checkout"
        return "fail", "not installed: torch.compile does not know backend `ipex`", advice
    foreign = [value for value in entry_points if not value.startswith("ipex_inductor.")]
    if foreign:
        return "fail", f"backend `ipex` is also {', '.join(foreign)}", "uninstall that package"
    return "ok", entry_points[0], ""


CHECKS: Mapping[str, Callable[[], Finding]] = {
    "python": _python,
    "torch": _torch,
    "backend ipex": _entry_point,
    "C++ compiler": _compiler,
    "Python headers": _python_headers,
    "CPU": _isa,
    "writes to weights": _write_watch,
    "GPU": _gpu,
    "triton": _triton,
    "prebuild": _prebuild,
    **SYCL_CHECKS,
    **CACHE_CHECKS,
    "torch's cache folder": _torch_cache_folder,
}


def examine(checks: Mapping[str, Callable[[], Finding]] = CHECKS) -> list[Check]:
    """Run all checks; a check that raises becomes a `fail` line with its error."""
    return [_run_check(name, check) for name, check in checks.items()]


def _run_check(name: str, check: Callable[[], Finding]) -> Check:
    try:
        return Check(name, *check())
    except IpexError as error:
        return Check(name, "fail", f"{error.came}; expected {error.expected}", error.todo)
    except Exception as error:  # a broken part of the machine must not hide the others
        return Check(name, "fail", f"{type(error).__name__}: {error}", "fix or reinstall it")


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def _table(checks: list[Check]) -> Listing:
    styles = {"ok": "green", "warn": "yellow", "fail": "bold red"}
    table = Listing("", "what", "found")
    for check in checks:
        cell = Text(check.detail)
        if check.todo:
            cell.append(f"\nto do: {check.todo}", style=styles[check.status])
        table.add_row(Text(check.status, style=styles[check.status]), Text(check.name), cell)
    return table


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Check this machine for everything that is needed. Exit code 1 if a required part fails."""
    checks = examine()
    if as_json:
        typer.echo(json.dumps({"checks": [asdict(check) for check in checks]}, indent=2))
    else:
        show(Console(), _table(checks))
    if any(check.status == "fail" for check in checks):
        raise typer.Exit(1)
