"""What importing costs, and what it must not do."""

import json
import os
import statistics
import subprocess
import sys

IMPORT = """
import json, sys, time
import torch
before = set(sys.modules)
start = time.perf_counter()
import ipex_inductor
spent = time.perf_counter() - start
print(json.dumps([spent, sorted(set(sys.modules) - before)]))
"""


def python(code, **env):
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_import_is_quick_and_light():
    runs = [json.loads(python(IMPORT)) for _ in range(3)]
    assert statistics.median(spent for spent, _ in runs) < 0.150
    assert not [m for m in runs[0][1] if m.startswith(("torch._inductor", "triton", "rich"))]


def test_import_makes_no_folder(tmp_path):
    python(
        "import torch, ipex_inductor",
        HOME=str(tmp_path),
        XDG_CACHE_HOME=str(tmp_path / "cache"),
        TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "torch"),
    )
    assert not list(tmp_path.iterdir())


def test_torch_lists_the_backend_without_importing_us():
    code = (
        "import sys, torch; print('ipex' in torch._dynamo.list_backends(),"
        " any(m.startswith('ipex_inductor') for m in sys.modules))"
    )
    assert python(code).split() == ["True", "False"]


COMPILE = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Softmax(-1)).eval()
fn = torch.compile(model, backend="ipex", options={"strict": True})
x = torch.randn(2, 8)
with torch.no_grad():
    torch.testing.assert_close(fn(x), model(x))
print("right")
"""


def test_a_home_that_cannot_be_written_does_not_matter(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("a file, so no folder can be made below it, not even by root")
    out = python(
        COMPILE,
        HOME=str(blocked / "home"),
        XDG_CACHE_HOME=str(blocked / "cache"),
        TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "torch"),
    )
    assert "right" in out


def test_no_compiler_names_the_package(tmp_path):
    run = subprocess.run(
        [sys.executable, "-c", COMPILE],
        env={**os.environ, "CXX": "/nonexistent/g++", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode != 0
    assert "CompilerNotFoundError" in run.stderr
    assert "apt-get install g++" in run.stderr
