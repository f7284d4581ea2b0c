"""What the machine can do to a compile: no writable home, no compiler."""

import os
import subprocess
import sys
import traceback

import pytest
import torch
from torch._inductor import cpp_builder
from torch._inductor.exc import InvalidCxxCompiler

COMPILE = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Softmax(-1)).eval()
fn = torch.compile(model, backend="ipex", options={"strict": True})
x = torch.randn(2, 8)
with torch.no_grad():
    torch.testing.assert_close(fn(x), model(x))
print("right")
"""


def python(**env):
    return subprocess.run(
        [sys.executable, "-c", COMPILE],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.slow  # 13 s; where no call of the cache's works: test_disk_faults.py
@pytest.mark.usefixtures("instructions_known")
def test_a_home_that_cannot_be_written_does_not_matter(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("a file, so no folder can be made below it, not even by root")
    run = python(
        HOME=str(blocked / "home"),
        XDG_CACHE_HOME=str(blocked / "cache"),
        TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "torch"),
        # Where there is a GPU, Triton builds its driver stub below HOME under any backend.
        TRITON_HOME=str(tmp_path),
    )
    assert run.returncode == 0, run.stderr
    assert "right" in run.stdout


def test_no_compiler_is_told_with_the_name_of_the_package(monkeypatch):
    """In this process, as Inductor asks for one."""

    def none(**_):
        raise InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none)
    fn = torch.compile(lambda x: x.sin() * 1.125, backend="ipex", options={"strict": True})
    with pytest.raises(Exception, match=r"apt-get install g\+\+") as told:
        fn(torch.ones(5))
    assert "CompilerNotFoundError" in "".join(traceback.format_exception(told.value))


@pytest.mark.slow  # 12 s
def test_no_compiler_names_the_package(tmp_path):
    unknown = {"TORCHINDUCTOR_VEC_ISA_OK": ""}
    run = python(CXX="/nonexistent/g++", TORCHINDUCTOR_CACHE_DIR=str(tmp_path), **unknown)
    assert run.returncode != 0
    assert "CompilerNotFoundError" in run.stderr
    assert "apt-get install g++" in run.stderr
