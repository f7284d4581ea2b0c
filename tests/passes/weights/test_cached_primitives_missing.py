"""Where oneDNN's kept primitives are not to be had: the reason is said, and torch computes."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ipex_inductor.aot_cache import toolkit
from ipex_inductor.compiler import graph_cache, request
from ipex_inductor.config import resolve
from ipex_inductor.passes.weights import cached_primitives as taken
from ipex_inductor.reporting import decisions
from ipex_inductor.target.device import architecture
from ipex_inductor.templates.cpu import cached_primitives

REASONS = {
    "not installed": "onednn-cpu-gomp is not installed (extra [onednn])",
    "not measured": f"they were not measured on {architecture()}: torch's are used",
}


@torch.no_grad()
@pytest.mark.parametrize("reason", REASONS)
def test_the_reason_is_said_and_torch_computes(reason, monkeypatch):
    measured = {(architecture(), torch.float32): taken.NOWHERE._replace(dense=9e9)}
    monkeypatch.setattr(taken, "FASTER", measured if reason == "not installed" else {})
    if reason == "not installed":
        monkeypatch.setattr(cached_primitives, "version_of", lambda name: "")
        monkeypatch.setattr(cached_primitives, "why_not", cached_primitives.why_not.__wrapped__)
        monkeypatch.setattr(cached_primitives, "_library", cached_primitives._library.__wrapped__)
    model, x = nn.Sequential(nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3)).eval(), torch.randn(1, 8, 9, 9)
    model, x = (each.to(memory_format=torch.channels_last) for each in (model, x))
    out = torch.compile(model, backend="ipex", options={"strict": True})(x)
    torch.testing.assert_close(out, model(x))
    events = [e for report in decisions.reports() for e in report.events]
    said = [(e.kind, e.reason) for e in events if e.subject == "kept primitives"]
    assert said == [("missed", REASONS[reason])]
    assert not [e for e in events if "by oneDNN's primitives" in e.reason]


@pytest.mark.parametrize(("kind", "differ"), [("cpu", True), ("cuda", False)])
def test_only_graphs_on_cpus_are_of_a_number_of_threads(kind, differ, monkeypatch):
    """Those of a GPU are found by hosts with other cores, with and without the wheel."""
    monkeypatch.setattr(request, "current", lambda kind: SimpleNamespace(arch=kind))
    gm = torch.fx.symbolic_trace(nn.Identity())

    def identity(wheel, threads):
        monkeypatch.setattr(request.graph_cache, "onednn", lambda: wheel)
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        asked = request.Request(gm, [], resolve(None, {"autotune": "inductor"}, {}, {}))
        vars(asked)["places"] = {torch.device(kind)}
        return asked.identity()

    found = [identity("2023.2", 2), identity("2023.2", 16), identity("", 2), identity("", 16)]
    assert len(set(found)) == (3 if differ else 1)


def a_wheel(monkeypatch, *files):
    places = [SimpleNamespace(name=f.name, locate=lambda f=f: f) for f in files]
    monkeypatch.setattr(cached_primitives, "version_of", lambda name: "2023.2.0")
    monkeypatch.setattr(
        cached_primitives, "distribution", lambda name: SimpleNamespace(files=places)
    )


def why_not():
    with pytest.raises(cached_primitives.KeptError) as error:
        cached_primitives._library.__wrapped__()
    return str(error.value)


def test_a_wheel_without_its_library(monkeypatch):
    a_wheel(monkeypatch, Path("README"))
    assert why_not() == "onednn-cpu-gomp has no libdnnl.so.3"


def test_a_library_that_does_not_load(monkeypatch, tmp_path):
    broken, gone = tmp_path / "libdnnl.so.3", tmp_path / "gone" / "libdnnl.so.3"
    broken.write_bytes(b"\x7fELF, and no more")
    for file in (broken, gone):
        a_wheel(monkeypatch, file)
        assert why_not() == f"{file}: no such library"


def test_a_library_with_other_functions(monkeypatch, tmp_path):
    file = tmp_path / "libdnnl.so.3"
    file.symlink_to(Path(torch.__file__).parent / "lib" / "libc10.so")
    a_wheel(monkeypatch, file)
    assert "no such library" in why_not()


@pytest.mark.skipif(
    not cached_primitives.installed_version(), reason="onednn-cpu-gomp is not installed"
)
def test_another_openmp_than_torchs_is_refused(monkeypatch):
    monkeypatch.setattr(cached_primitives, "_openmp", lambda library: "libtorch" in library)
    assert why_not() == f"{cached_primitives.path()}: its threads would be others than torch's"


OPEN = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).kept_open(sys.argv[2].encode()))"

NAMED = "from ipex_inductor.compiler import graph_cache as graph_files; print(graph_files.onednn())"


@pytest.mark.skipif(bool(cached_primitives.why_not()), reason="onednn-cpu-gomp is not installed")
def test_beside_a_preloaded_onednn_it_is_refused(tmp_path):
    """Its calls of its own functions would go to that one's, and end the process."""
    ours, source = (
        str(tmp_path / "kept.so"),
        Path(cached_primitives.__file__).with_name("cached_primitives.cpp"),
    )
    subprocess.check_call([toolkit.compiler(), "-shared", "-fPIC", "-o", ours, source])
    command = [sys.executable, "-c", OPEN, ours, cached_primitives.path()]
    codes = []
    for preloaded in ("", cached_primitives.path()):
        environment = {**os.environ, "LD_PRELOAD": preloaded}
        codes.append(int(subprocess.check_output(command, env=environment, timeout=60)))
    assert codes == [0, -4]
    named = [sys.executable, "-c", NAMED]
    keys = subprocess.check_output(named, env=environment, timeout=60, text=True)
    assert not keys.split()  # of graphs
    assert graph_cache.onednn() == cached_primitives.installed_version()
    assert "LD_PRELOAD" in cached_primitives.ERRORS[-4]
