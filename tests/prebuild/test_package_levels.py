"""Packages for levels of x86-64: each with its instructions, refused where a CPU lacks them."""

import functools
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._inductor import config as inductor
from typer.testing import CliRunner

import ipex_inductor
from ipex_inductor import compat
from ipex_inductor.aot_cache.bundle import open_bundle
from ipex_inductor.aot_cache.digest import unframe_fields
from ipex_inductor.aot_cache.entry import unpack_any
from ipex_inductor.aot_cache.folder import SUFFIX
from ipex_inductor.aot_cache.key import read
from ipex_inductor.cli import app
from ipex_inductor.errors import TargetError
from ipex_inductor.prebuild import loading
from ipex_inductor.target import device
from ipex_inductor.target.device import runs_on
from support.cache.signed_bundles import MODEL

LEVELS = """
import sys, torch, ipex_inductor
started = []
sys.addaudithook(
    lambda event, about: started.append(str(about[0])) if event == "subprocess.Popen" else None
)
state, x, want = torch.load(sys.argv[2])
loaded = ipex_inductor.load(sys.argv[1], state, allow_unsigned=True)
with torch.no_grad():
    torch.testing.assert_close(loaded(x), want, rtol=1e-4, atol=1e-5)
print("RESULT", started)
"""


class Activated(nn.Module):
    """A library's product, and a loop that is vectorised."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x):
        return torch.softmax(torch.tanh(self.layer(x)) * x, -1)


@pytest.fixture(scope="module")
def levelled(tmp_path_factory):
    """Packages for two levels of x86-64, made when asked for, and what a process makes of one."""
    folder = tmp_path_factory.mktemp("levels")
    model, x = Activated().eval(), torch.randn(8, 64)
    with torch.no_grad():
        torch.save((model.state_dict(), x, model(x)), folder / "saved")
    made_for = {name: [device.find_target(f"x86-64:{name}")] for name in ("avx2", "avx512")}
    made_for["both"] = [*made_for["avx512"], *made_for["avx2"]]

    @functools.cache
    def make(name):
        before = levels_seen()
        ipex_inductor.package(model, (x,), folder / name, targets=made_for[name])
        assert levels_seen() == before

    def load(bundle, **env):
        make(bundle)
        command = [sys.executable, "-c", LEVELS, str(folder / bundle), str(folder / "saved")]
        env = os.environ | {"IPEX_HOME": str(folder / "home")} | env
        return subprocess.run(command, env=env, capture_output=True, text=True)

    # Of a level two headers would be compiled for one use each.
    with inductor.patch({"aot_inductor.precompile_headers": False}):
        yield SimpleNamespace(folder=folder, load=load, make=make)


def levels_seen():
    """What `x86_levels.target_level` may change."""
    from torch._inductor import cpu_vec_isa

    from ipex_inductor.passes.weights import packing

    return (
        cpu_vec_isa.valid_vec_isa_list,
        torch.ops.mkldnn._is_mkldnn_bf16_supported,
        packing.onednn_dtypes(),
        device.architecture(),
    )


def library_of(path, arch):
    bundle = open_bundle(path, True, True)
    for item in bundle.manifest.entries:
        framed, entry = unpack_any(bundle.load(item.key + SUFFIX))
        if read(framed)["architecture"] == arch:
            return unframe_fields(entry.blob)["model.so"]
    raise AssertionError(arch)


on_x86 = pytest.mark.skipif(
    not (runs_on("x86-64:avx2", loading.current().arch) and compat.compiles_for_levels()),
    reason="not x86-64, or a torch that compiles for the CPU here alone",
)


@on_x86
@pytest.mark.skipif(shutil.which("objdump") is None, reason="no objdump")
@pytest.mark.slow  # 50 seconds, of which compilers take most
def test_another_level_has_that_levels_instructions(levelled, tmp_path):
    found = {}
    levelled.make("both")
    for name in ("avx2", "avx512"):
        (tmp_path / name).write_bytes(library_of(levelled.folder / "both", f"x86-64:{name}"))
        told = subprocess.run(
            ["objdump", "-d", str(tmp_path / name)], capture_output=True, text=True, check=True
        ).stdout
        found[name] = "%ymm" in told, "%zmm" in told
        assert "vdpbf16ps" not in told
        assert "vcvtne2ps2bf16" not in told
    assert found == {"avx2": (True, False), "avx512": (True, True)}


@on_x86
@pytest.mark.slow  # 15 seconds; which is taken and that it needs no compiler: test_prebuild.py
@pytest.mark.parametrize("bundle", ["avx2", "both"])
def test_a_cpu_of_the_lower_level_runs_it_without_a_compiler(levelled, bundle):
    done = levelled.load(bundle, ATEN_CPU_CAPABILITY="avx2")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "RESULT []" in done.stdout
    assert levelled.load(bundle).returncode == 0


@on_x86
@pytest.mark.slow  # 13 seconds; a package for one level alone is refused in test_prebuild.py
def test_a_level_that_the_cpu_lacks_is_refused(levelled):
    done = levelled.load("avx512", ATEN_CPU_CAPABILITY="avx2")
    assert done.returncode == 1
    assert "built for x86-64:avx512, running on x86-64:avx2" in done.stderr


@on_x86
@pytest.mark.slow  # 15 seconds; the packages themselves are tested above
def test_the_verb_makes_packages_for_levels(tmp_path, monkeypatch):
    monkeypatch.setenv("IPEX_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "made_for_levels.py").write_text(MODEL)
    asked = ["prebuild", "made_for_levels:make", "--arch", "x86-64:avx2", "-o", "out"]
    done = CliRunner().invoke(app, [*asked, "--package", "--arch", "x86-64:amx"])
    assert done.exit_code == 0, done.output
    bundle = open_bundle(tmp_path / "out", True, True)
    made_for = {
        read(unpack_any(bundle.load(item.key + SUFFIX))[0])["architecture"]
        for item in bundle.manifest.entries
    }
    assert made_for == {"x86-64:avx2", "x86-64:amx"}


def test_an_older_torch_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(compat, "compiles_for_levels", lambda: False)
    net, avx2 = Activated().eval(), device.find_target("x86-64:avx2")
    with pytest.raises(TargetError, match=r"a torch that compiles for other CPUs|a level of x86"):
        ipex_inductor.package(net, (torch.ones(8, 64),), tmp_path / "n", targets=[avx2])


def test_a_cpu_that_is_none_of_x86_is_told(tmp_path):
    arm, x = device.Target("any", "aarch64:sve256", 1), torch.ones(8, 64)
    with pytest.raises(TargetError, match="a level of x86-64"):
        ipex_inductor.package(Activated().eval(), (x,), tmp_path / "n", targets=[arm])
