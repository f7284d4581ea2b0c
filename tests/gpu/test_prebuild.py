"""Graphs built by a process that sees no GPU, used by one that does: nothing is compiled."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu

BUILD = """
import sys
from test_prebuild_gpu import make
from ipex_inductor.prebuild import graphs
from ipex_inductor.target import described

done = graphs.prebuild(*make(), described(sys.argv[2]))
assert (done.kernels_only, done.missing) == ("", []), (done.kernels_only, done.missing)
graphs.pack([done], sys.argv[1])
"""

USE = """
import json, sys, torch, triton
from test_prebuild_gpu import make
from torch._inductor.fx_passes import pad_mm
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
import ipex_inductor
from ipex_inductor import backend, decisions

compiled, timed = [], []
triton.knobs.compilation.listener = lambda **about: compiled.append(not about["cache_hit"])
CachingAutotuner.bench = lambda self, *_, **__: timed.append(self.fn.__name__) or 1.0
if sys.argv[1]:
    ipex_inductor.use_bundle(sys.argv[1], allow_unsigned=True)
else:  # to choose as a builder does
    torch._inductor.config.compile_threads = 1
    def first(self, *_, **__):
        self.launchers = self.launchers[:1]
    CachingAutotuner.autotune_to_one_config = first
    CachingAutotuner._dynamic_scale_rblock = lambda self: None
    pad_mm._should_pad = lambda *_, **__: False
model, inputs = make()
model, inputs = model.cuda(), [value.cuda() for value in inputs]
with torch.no_grad():
    got = torch.compile(model, backend=backend.compile_graph, options={"strict": True})(*inputs)
    error = (got - model(*inputs)).abs().max().item()
(event,) = (e for r in decisions.reports() for e in r.events if e.kind == "cache")
found = {"outcome": event.subject, "why": event.reason, "error": error, "timed": timed}
print(json.dumps(found | {"compiled": sum(compiled), "got": got.flatten().tolist()}))
"""


def run(program, folder, *arguments, **variables):
    ours = ("TORCHINDUCTOR_", "TRITON_CACHE_DIR", "IPEX_")
    env = {n: v for n, v in os.environ.items() if not n.startswith(ours)}
    tests = os.path.dirname(os.path.dirname(__file__))
    paths = tests, os.path.join(tests, "reliability"), env.get("PYTHONPATH")
    env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    env |= {"IPEX_HOME": str(folder), **variables}
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_what_was_built_without_a_gpu_is_found_and_right(tmp_path):
    from ipex_inductor.target import current, table

    here = str(current("cuda"))
    if here not in map(str, table()):
        pytest.skip(f"{here} is in no table")
    bundle = tmp_path / "net.ipexbundle"
    run(BUILD, tmp_path / "builder", str(bundle), here, CUDA_VISIBLE_DEVICES="")
    found = json.loads(run(USE, tmp_path / "user", str(bundle)).splitlines()[-1])
    cold = json.loads(run(USE, tmp_path / "cold", "").splitlines()[-1])
    assert (found["outcome"], found["compiled"], found["timed"]) == ("hit", 0, []), found["why"]
    assert cold["outcome"] == "miss"
    assert cold["compiled"] >= 3
    assert found["got"] == cold["got"]  # to the bit
    # Probabilities of about 1/64; convolutions are in TF32 (3 digits), as torch has it by default.
    assert found["error"] < 1e-3
