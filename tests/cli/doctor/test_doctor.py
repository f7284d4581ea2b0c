"""The doctor: what it finds here, and what it says where something is missing or broken."""

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from ipex_inductor import compat
from ipex_inductor.aot_cache import toolkit
from ipex_inductor.cli import app
from ipex_inductor.cli.doctor import doctor, sycl
from ipex_inductor.cli.doctor.doctor import CHECKS, Check, examine
from ipex_inductor.errors import TargetError
from ipex_inductor.target import device as target
from ipex_inductor.target.device import Target
from ipex_inductor.templates.sycl import wheels
from ipex_inductor.templates.tensor_reader import write_watch

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[3]


def only(name):
    """The line of one check."""
    return examine({name: CHECKS[name]})[0]


@pytest.fixture
def script(tmp_path):
    """Makes an executable shell script and returns its path."""

    def make(body):
        path = tmp_path / "tool"
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
        return str(path)

    return make


# --- the report


def test_every_check_gives_a_line_here_and_none_crashes():
    found = examine()
    assert [check.name for check in found] == list(CHECKS)
    assert {check.status for check in found} <= {"ok", "warn", "fail"}
    assert not [check for check in found if "Error" in check.detail]
    assert all(check.todo for check in found if check.status != "ok")


def test_a_check_that_crashes_is_a_line():
    def boom():
        raise OSError("libtorch.so: cannot open")

    assert examine({"torch": boom, "fine": lambda: ("ok", "here", "")}) == [
        Check("torch", "fail", "OSError: libtorch.so: cannot open", "fix or reinstall it"),
        Check("fine", "ok", "here"),
    ]


def test_an_error_of_ours_keeps_its_advice():
    def boom():
        raise TargetError("a known CPU", "sparc", "Use another one.")

    assert examine({"CPU": boom}) == [
        Check("CPU", "fail", "sparc; expected a known CPU", "Use another one.")
    ]


@pytest.mark.parametrize(
    ("statuses", "code"), [(("ok", "warn"), 0), (("ok", "fail", "warn"), 1), (("ok",), 0)]
)
@pytest.mark.parametrize("args", [[], ["--json"]], ids=["table", "json"])
def test_exit_code_is_1_exactly_when_something_fails(monkeypatch, statuses, code, args):
    lines = {f"c{i}": (lambda s=s: (s, "[bold]x[/bold]", "do")) for i, s in enumerate(statuses)}
    monkeypatch.setattr(doctor, "examine", lambda: examine(lines))
    done = CliRunner().invoke(app, ["doctor", *args])
    assert done.exit_code == code
    assert "[bold]x[/bold]" in done.stdout


def test_json_is_the_lines(monkeypatch):
    monkeypatch.setattr(doctor, "examine", lambda: [Check("a", "warn", "b", "c")])
    done = CliRunner().invoke(app, ["doctor", "--json"])
    assert json.loads(done.stdout) == {
        "checks": [{"name": "a", "status": "warn", "detail": "b", "todo": "c"}]
    }


def test_the_table_cuts_nothing_off(monkeypatch):
    path = "/" + "0123456789" * 20
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(doctor, "examine", lambda: [Check("a", "warn", path, "c")])
    done = CliRunner().invoke(app, ["doctor"])
    assert "…" not in done.stdout
    assert sum(done.stdout.count(digit) for digit in "0123456789") == 200
    assert "to do: c" in done.stdout


# --- the compiler


@pytest.fixture
def needs_gxx():
    if only("C++ compiler").status != "ok":
        pytest.skip("no g++ here")


@pytest.mark.usefixtures("needs_gxx")
def test_a_compiler_that_builds_openmp_is_ok(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    found = only("C++ compiler")
    assert found.status == "ok"
    assert found.detail.endswith("; OpenMP with 3 threads")


def test_no_compiler_fails_and_names_the_packages(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CXX", str(tmp_path / "nothing"))
    found = only("C++ compiler")
    assert (found.status, found.detail) == ("fail", f"'{tmp_path}/nothing' not found")
    assert "apt-get install g++" in found.todo
    assert "dnf install gcc-c++" in found.todo
    assert "set CXX" in found.todo


@pytest.mark.slow  # 15 s; each check by itself, what crashes it, and exit codes are below
def test_no_compiler_makes_the_command_fail_and_nothing_else_crash(tmp_path):
    env = os.environ | {"PATH": "", "CXX": str(tmp_path / "nothing"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "ipex_inductor", "doctor", "--json"]
    done = subprocess.run(command, env=env, cwd="/", capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    lines = {line["name"]: line for line in json.loads(done.stdout)["checks"]}
    assert lines["C++ compiler"]["status"] == "fail"
    assert "Traceback" not in done.stderr
    assert not [line for line in lines.values() if "Error" in line["detail"]]


def test_clang_alone_needs_cxx_because_torch_looks_for_gxx(monkeypatch, tmp_path, script):
    clang = Path(script("exit 0")).rename(tmp_path / "clang++")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    found = only("C++ compiler")
    assert (found.status, found.detail) == ("fail", "'g++' not found")
    assert found.todo == f"export CXX={clang}"


def test_a_broken_compiler_is_quoted(monkeypatch, script):
    cxx = script("echo 'omp.cpp:1:10: fatal error: omp.h: No such file' >&2; exit 1")
    monkeypatch.setenv("CXX", cxx)
    found = only("C++ compiler")
    assert found.status == "fail"
    assert "cannot build an OpenMP program: omp.cpp:1:10: fatal error: omp.h" in found.detail
    assert "apt-get install g++" in found.todo


def test_a_compiler_whose_program_does_not_run_fails(monkeypatch, script):
    monkeypatch.setenv("CXX", script('printf "#!/bin/sh\\nexit 3\\n" > "$4"; chmod +x "$4"'))
    found = only("C++ compiler")
    assert (found.status, "no message" in found.detail) == ("fail", True)


def test_missing_python_headers_name_the_packages(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor.sysconfig, "get_path", lambda name: str(tmp_path))
    found = only("Python headers")
    assert found.status == "fail"
    assert f"{tmp_path}/Python.h is missing" in found.detail
    assert "python3-dev" in found.todo
    assert "python3-devel" in found.todo


# --- torch and triton


def test_torch_names_version_build_and_tested_range():
    found = only("torch")
    assert found.status == "ok"
    assert found.detail.startswith(f"{torch.__version__}, ")
    assert found.detail.endswith(" build; tested are 2.11 to 2.15")


def test_a_newer_torch_is_a_warning_and_an_older_one_a_failure(monkeypatch):
    monkeypatch.setattr(compat, "VERSION", "2.16.0.dev1")
    assert only("torch").status == "warn"
    assert "newer than the newest tested one, 2.15" in only("torch").detail
    monkeypatch.setattr(compat, "VERSION", "2.4.1+cpu")
    assert only("torch").status == "fail"
    assert "pip install" in only("torch").todo


def test_missing_triton_is_a_warning(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    found = only("triton")
    assert (found.status, found.todo) == ("warn", "pip install triton")


# --- devices


def fake_gpus(monkeypatch, cuda=(), xpu=(), **properties):
    found = {"cuda": cuda, "xpu": xpu}
    for kind, gpus in found.items():
        module = getattr(torch, kind)
        monkeypatch.setattr(module, "device_count", lambda gpus=gpus: len(gpus))
        monkeypatch.setattr(
            module, "get_device_properties", lambda i: SimpleNamespace(**properties)
        )
    monkeypatch.setattr(target, "current", lambda device: found[device.type][device.index])


H200 = Target("NVIDIA H200", "sm_90", 132)
MI300 = Target("AMD Instinct MI300X", "gfx942", 304)
B580 = Target("Intel Arc B580", "xe:20.1", 20)


def test_no_gpu_is_fine(monkeypatch):
    fake_gpus(monkeypatch)
    monkeypatch.setattr(doctor, "GPU_TRACES", {"NVIDIA": ("/no/such/device",)})
    assert only("GPU") == Check("GPU", "ok", "none; graphs run on the CPU")


def test_a_driver_that_torch_cannot_use_is_a_warning(monkeypatch):
    fake_gpus(monkeypatch)
    monkeypatch.setattr(doctor, "GPU_TRACES", {"NVIDIA": ("/no", "/dev/nul*"), "AMD": ("/no",)})
    found = only("GPU")
    assert found.status == "warn"
    assert found.detail == f"a driver for NVIDIA, but torch {torch.__version__} sees no GPU"


def test_nvidia_gpus_with_architecture_and_driver(monkeypatch, tmp_path):
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX  Kernel Module  570.86.15  Thu\n")
    monkeypatch.setattr(doctor, "DRIVER_VERSIONS", {"cuda": tmp_path / "version"})
    fake_gpus(monkeypatch, cuda=(H200, H200))
    assert only("GPU") == Check("GPU", "ok", "2 x NVIDIA H200 (sm_90, driver 570.86.15)")


def test_an_amd_gpu_without_a_driver_version(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "DRIVER_VERSIONS", {"hip": tmp_path / "missing"})
    fake_gpus(monkeypatch, cuda=(MI300,))
    assert only("GPU").detail == "1 x AMD Instinct MI300X (gfx942, driver of unknown version)"


def test_an_intel_gpu_tells_its_driver(monkeypatch):
    fake_gpus(monkeypatch, xpu=(B580,), driver_version="1.6.33578")
    assert only("GPU").detail == "1 x Intel Arc B580 (xe:20.1, driver 1.6.33578)"


def test_the_cpu_line_names_the_instruction_set():
    found = only("CPU")
    assert found.status == "ok"
    assert found.detail.startswith(("x86-64", "aarch64"))


# --- SYCL


@pytest.fixture
def package(monkeypatch, tmp_path):
    """Installs a package of that name, whose files are these."""
    found = {}

    def install(name, **files):
        for file, content in files.items():
            (tmp_path / file).write_bytes(content)
        record = "".join(f"lib/{file},,\n" for file in files)
        found[name] = SimpleNamespace(
            version="9.9", read_text=lambda _: record, locate_file=lambda f: tmp_path / Path(f).name
        )

    def distribution(name):
        if name not in found:
            raise metadata.PackageNotFoundError(name)
        return found[name]

    wheels.runtime.cache_clear()
    monkeypatch.setattr(wheels.metadata, "distribution", distribution)
    yield install
    wheels.runtime.cache_clear()


def test_no_sycl_is_fine(package):
    said = 'no intel-sycl-rt; only Intel GPUs and options={"sycl": "cpu"} use it'
    assert only("SYCL") == Check("SYCL", "ok", said)


def test_half_a_package_is_a_warning(package):
    package("intel-sycl-rt")
    found = only("SYCL")
    assert (found.status, found.detail) == ("warn", "intel-sycl-rt 9.9 without it")
    assert found.todo == "pip install --force-reinstall intel-sycl-rt==9.9"


@pytest.mark.parametrize(
    ("program", "status", "says"),
    [
        ("print('[]')", "warn", "libsycl.so.9 of intel-sycl-rt 9.9 sees no device"),
        ("raise SystemExit('cannot open')", "warn", "{} does not work: cannot open"),
        ("import os; os.abort()", "warn", "{} does not work: exit status -6"),
        ('print(\'["no g++", "install it"]\')', "warn", "{}: no g++"),
        (
            'print(\'[{"name": "Xe", "type": "gpu", "backend": "zero",\'\' "driver": "1.6"}]\')',
            "ok",
            "{}: Xe (gpu, zero 1.6)",
        ),
    ],
)
def test_a_runtime_tells_its_devices(monkeypatch, package, program, status, says):
    package("intel-sycl-rt", **{"libsycl.so.9": b""})
    monkeypatch.setattr(sycl, "PROGRAM", program)
    found = only("SYCL")
    assert (found.status, found.detail) == (
        status,
        says.format("libsycl.so.9 of intel-sycl-rt 9.9"),
    )
    assert bool(found.todo) == (status == "warn")


def test_ocloc_is_only_information(monkeypatch, tmp_path, script):
    Path(script("exit 0")).rename(tmp_path / "ocloc")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert only("ocloc") == Check("ocloc", "ok", str(tmp_path / "ocloc"))
    monkeypatch.setenv("PATH", "")
    assert (only("ocloc").status, only("ocloc").todo) == ("ok", "")


# --- folders


@pytest.mark.parametrize(
    ("mode", "status", "says"),
    [
        (0o700, "ok", ", yours, mode 0700"),
        (0o777, "fail", " has mode 0777: others can write it; chmod 700 it"),
        (0o555, "warn", " has mode 0555: you cannot write it"),
    ],
    ids=["0700", "0777", "0555"],
)
def test_the_cache_folder(monkeypatch, tmp_path, mode, status, says):
    folder = tmp_path / "home"
    folder.mkdir()
    folder.chmod(mode)
    monkeypatch.setenv("IPEX_HOME", str(folder))
    found = only("cache folder")
    assert (found.status, found.detail) == (status, f"{folder}{says}")
    assert ("IPEX_HOME" in found.todo) == (status != "ok")


def test_a_missing_cache_folder_is_not_made_by_asking(monkeypatch, tmp_path):
    monkeypatch.setenv("IPEX_HOME", str(tmp_path / "home"))
    assert only("cache folder").detail == f"{tmp_path}/home, made on first use"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mode", [0o775, 0o777], ids=oct)
def test_a_torch_cache_others_can_write_is_a_warning(monkeypatch, tmp_path, mode):
    folder = tmp_path / "torch"
    folder.mkdir()
    folder.chmod(mode)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    found = only("torch's cache folder")
    assert found.status == "warn"
    assert "others can write it" in found.detail
    assert "unpickles" in found.detail
    assert "TORCHINDUCTOR_CACHE_DIR" in found.todo


def test_a_torch_cache_of_somebody_else_is_a_warning(monkeypatch, tmp_path):
    folder = tmp_path / "torch"
    folder.mkdir()
    try:
        os.chown(folder, 65534, -1)
    except PermissionError:
        pytest.skip("only root can give a folder away")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    assert "belongs to uid 65534" in only("torch's cache folder").detail


def test_the_torch_cache_is_the_one_torch_uses_and_is_not_made(monkeypatch, tmp_path):
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    found = only("torch's cache folder")
    detail = f"{default_cache_dir()}, made on first use; backend `ipex` has its own"
    assert found == Check("torch's cache folder", "ok", detail)
    assert list(tmp_path.iterdir()) == []


# --- the entry point


@pytest.fixture
def installed(monkeypatch):
    def install(*values):
        points = [SimpleNamespace(value=value) for value in values]
        monkeypatch.setattr(metadata, "entry_points", lambda **asked: points)

    return install


def test_the_entry_point(installed):
    ours = "ipex_inductor.backend:compile_graph"
    installed(ours)
    assert only("backend ipex") == Check("backend ipex", "ok", ours)
    installed(ours, "other.thing:compile")
    assert only("backend ipex").status == "fail"
    assert "other.thing:compile" in only("backend ipex").detail
    installed()
    assert only("backend ipex").status == "fail"
    assert "pip install" in only("backend ipex").todo


def test_prebuild_says_what_it_can_make(monkeypatch):
    reasons = {"cuda": "torch is not built for CUDA", "hip": "torch is not built for HIP"}
    monkeypatch.setattr(compat, "why_not_for", lambda kind: reasons[kind])
    assert doctor._prebuild()[:2] == (
        "ok",
        "kernels only, as a check: torch is not built for CUDA; its CUDA build needs no GPU",
    )
    reasons["cuda"] = ""
    assert "graphs for any GPU of CUDA" in doctor._prebuild()[1]
    monkeypatch.setattr(toolkit, "compiler", lambda: None)
    assert doctor._prebuild()[0] == "warn"


def test_writes_that_the_kernel_does_not_note_are_a_warning(monkeypatch):
    monkeypatch.setattr(write_watch, "why_not", lambda: "needs Linux 6.7")
    found = only("writes to weights")
    assert (found.status, found.todo) == ("warn", "needs Linux 6.7")
    monkeypatch.setattr(write_watch, "why_not", lambda: "")
    assert only("writes to weights").status == "ok"
