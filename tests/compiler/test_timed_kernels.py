"""Triton kernels that are timed when they first run: in the graph's folder, and once a machine.

On a GPU that is not here: Triton compiles for it; what would load a kernel and time it is replaced.
"""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ipex_inductor.aot_cache.entry import unpack_any
from ipex_inductor.aot_cache.graph_files import workroom
from ipex_inductor.compiler import timed_kernels

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="an H200 is pretended here; tests/gpu has the real one"
)

RUN = """
import json, os, sys
import torch, triton
from torch import nn
from torch._inductor.runtime import triton_heuristics as heuristics
from torch._inductor.runtime.runtime_utils import triton_hash_to_path_key
from ipex_inductor import compat
from ipex_inductor.compiler import timed_kernels
from ipex_inductor.aot_cache.graph_files import workroom
from ipex_inductor.prebuild import described, graphs
from ipex_inductor.target.device import find_target as target

compat.why_not_for = lambda kind: ""  # this build of torch stands for one with CUDA
told = json.loads(sys.argv[1])
compiled, timed, launched = [], [], []
triton.knobs.compilation.listener = lambda **about: compiled.append(not about["cache_hit"])

def launcher_of(result):
    def launch(*args, stream, **kwargs):
        launched.append({**result.config.kwargs, "num_warps": result.config.num_warps})
    launch.config, launch.store_cubin = result.config, False
    launch.n_regs = launch.n_spills = launch.shared = 0
    launch.cache_hash = triton_hash_to_path_key(result.kernel.hash)
    return launch

def bench(kernel, launcher, *args, **kwargs):
    timed.append(launcher.config)
    return abs(launcher.config.kwargs["XBLOCK"] - 128) + launcher.config.num_warps  # 128, 1 warp

heuristics.StaticTritonCompileResult.make_launcher = launcher_of
heuristics.TritonCompileResult.make_launcher = launcher_of
heuristics.CachingAutotuner.bench = bench

class Model(nn.Module):
    def forward(self, x):
        return (x.sin() + 1.5).cos()

done = graphs.prebuild(
    Model().eval(), (torch.ones(64, 1024),), target("h200"), options=told["options"]
)
(event,) = (event for event in done.events if event.kind == "cache")
at_compile_time = sum(compiled)
(kernel,) = timed_kernels._kernels_in(workroom.room())
kernel.launchers = [launcher_of(result) for result in kernel.compile_results]
followed = "run" in vars(kernel)
with described.device(target("h200")):
    for _ in range(2):
        kernel.run(None, None, 65536, stream=0)
print(json.dumps({
    "outcome": event.subject, "at_compile_time": at_compile_time, "compiled": sum(compiled),
    "timed": len(timed), "launched": launched, "followed": [followed, "run" in vars(kernel)],
}))
"""

TUNED = {"coordinate_descent_tuning": True}
BEST = {"XBLOCK": 128, "num_warps": 1}


def run(base, **options):
    """What one process says; torch's usual folder is in `base`/tmp, our home is `base`/home."""
    (base / "tmp").mkdir(parents=True, exist_ok=True)
    kept_out = ("TORCHINDUCTOR_", "TRITON_")
    env = {n: v for n, v in os.environ.items() if not n.startswith(kept_out)}
    env |= {"TMPDIR": str(base / "tmp"), "IPEX_HOME": str(base / "home")}
    command = [sys.executable, "-c", RUN, json.dumps({"options": options})]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def graph(base):
    """The files of its one entry."""
    entries = (base / "home" / "kernels" / "1").glob("*.entry")
    (found,) = (e for e in entries if b"graph" in e.read_bytes()[60:100])
    return workroom.unpack_files(unpack_any(found.read_bytes())[1].blob)


def groups(names):
    return {Path(name).parent for name in map(str, names) if "__grp__" in name}


@pytest.fixture(scope="module")
def tuned(guard_known, tmp_path_factory):
    """Home and usual folder as one process leaves them, and what it told."""
    base = tmp_path_factory.mktemp("tuned")
    return base, run(base, **TUNED)


def test_what_is_compiled_to_be_timed_lies_in_the_graphs_folder(tuned):
    base, done = tuned
    assert (done["outcome"], done["followed"]) == ("miss", [True, False])
    assert done["compiled"] - done["at_compile_time"] >= 4
    assert done["timed"] > 4
    assert done["launched"][-2:] == [BEST] * 2
    assert [p for p in (base / "tmp").rglob("*") if p.is_file()] == []


def test_of_what_was_timed_the_fastest_is_kept(tuned):
    base, done = tuned
    files = graph(base)
    (best,) = (json.loads(data) for name, data in files.items() if name.endswith(".best_config"))
    assert {name: best[name] for name in BEST} == BEST
    assert best["found_by_coordesc"]
    weights = 2  # kernels that hash and compare weights, which are entries of their own
    assert len(groups(files)) == done["at_compile_time"] - weights + 1
    rooms = base / "home" / "torch"
    assert list(rooms.iterdir()) == []


@pytest.mark.slow  # 10 s; what it finds is in the entry, as the test above sees
def test_the_next_process_neither_compiles_nor_times(tuned):
    base, _ = tuned
    done = run(base, **TUNED)
    assert (done["outcome"], done["compiled"], done["timed"]) == ("hit", 0, 0)
    assert done["launched"] == [BEST] * 2
    assert [p for p in (base / "tmp").rglob("*") if p.is_file()] == []
    assert list((base / "home" / "torch").iterdir()) == []


class Kernel:
    """One whose first run compiles and picks another configuration."""

    def __init__(self, folder, name):
        self.folder, self.name = folder, name
        self.inductor_meta = {"coordinate_descent_tuning": True}
        self.save_cache_hook, self.filename = None, None
        self._takes(name, False)
        self._compiled(name)

    def run(self):
        for way in ("slower", "tuned"):
            self._compiled(self.name + way)
        self._takes(self.name + "tuned", True)

    def _takes(self, name, found):
        config = SimpleNamespace(found_by_coordesc=found)
        self.launchers = [SimpleNamespace(config=config, cache_hash=name)]

    def _compiled(self, name):
        (self.folder / name).mkdir()
        (self.folder / name / f"__grp__{name}.json").write_text("{}")


def test_a_late_kernel_removes_nothing_of_the_backwards(tmp_path, monkeypatch):
    """It runs in a branch that is taken after the backward was compiled into the folder."""
    kernels = [Kernel(tmp_path, "first"), Kernel(tmp_path, "late")]
    monkeypatch.setattr(timed_kernels, "_kernels_in", lambda _: iter(kernels))
    kept = []
    follow = (tmp_path, contextlib.nullcontext, lambda: kept.append(os.listdir(tmp_path)))
    timed_kernels.follow(*follow)
    first, late = kernels
    first.run()
    kernels.append(Kernel(tmp_path, "backward"))
    timed_kernels.follow(*follow)
    kernels[2].run()
    late.run()
    names = ("backward", "backwardtuned", "first", "firsttuned", "late", "latetuned")
    assert sorted(kept[-1]) == [*names]
