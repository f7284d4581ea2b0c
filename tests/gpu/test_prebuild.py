"""Graphs built by a process that sees no GPU, used by one that does: nothing is compiled."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu

BUILD = """
import sys
from test_prebuild_gpu import make, make_step
from ipex_inductor.prebuild import graphs
from ipex_inductor.target.device import find_target

model, inputs, optimizer = make_step()
done = [
    graphs.prebuild(*make(), find_target(sys.argv[2])),
    graphs.prebuild(model, inputs, find_target(sys.argv[2]), training=True, optimizer=optimizer),
]
for each in done:
    assert (each.kernels_only, each.missing) == ("", []), (each.kernels_only, each.missing)
graphs.pack(done, sys.argv[1])
"""

USE = """
import copy, json, sys, torch, triton
from test_prebuild_gpu import make, make_step
from torch._inductor.fx_passes import pad_mm
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
import ipex_inductor
from ipex_inductor import backend
from ipex_inductor.reporting import decisions

compiled, timed, started = [], [], []
sys.addaudithook(
    lambda event, about: started.append(str(about[0])) if event == "subprocess.Popen" else None
)
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
trains = sys.argv[2] == "train"
model, inputs, *optimizer = make_step() if trains else make()
model, inputs = model.cuda(), [value.cuda() for value in inputs]
eager = copy.deepcopy(model)
call = torch.compile(model, backend=backend.compile_graph, options={"strict": True})
with torch.set_grad_enabled(trains):
    got, wanted = call(*inputs), eager(*inputs)
if trains:
    usual = torch.optim.AdamW(eager.parameters())
    for loss, step, side in ((got, optimizer[0], model), (wanted, usual, eager)):
        loss.backward()
        if side is eager:
            torch.nn.utils.clip_grad_norm_(side.parameters(), 1.0)
        step.step()
    got, wanted = (torch.cat([p.flatten() for p in m.parameters()]) for m in (model, eager))
error = (got - wanted).abs().max().item()
(event,) = (e for r in decisions.reports() for e in r.events if e.kind == "cache")
found = {"outcome": event.subject, "why": event.reason, "error": error, "timed": timed}
found["g++"] = [name for name in started if "++" in name]
print(json.dumps(found | {"compiled": sum(compiled), "got": got.flatten().tolist()}))
"""


def run(program, folder, *arguments, **variables):
    ours = ("TORCHINDUCTOR_", "TRITON_CACHE_DIR", "IPEX_")
    env = {n: v for n, v in os.environ.items() if not n.startswith(ours)}
    tests = os.path.dirname(os.path.dirname(__file__))
    paths = tests, os.path.join(tests, "prebuild"), env.get("PYTHONPATH")
    env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    env |= {"IPEX_HOME": str(folder), **variables}
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_what_was_built_without_a_gpu_is_found_and_right(tmp_path):
    from ipex_inductor.target.device import current, table

    here = str(current("cuda"))
    if here not in map(str, table()):
        pytest.skip(f"{here} is in no table")
    bundle = tmp_path / "net.ipexbundle"
    run(BUILD, tmp_path / "builder", str(bundle), here, CUDA_VISIBLE_DEVICES="")
    found, cold = used(tmp_path, bundle, "eval")
    assert (found["outcome"], found["compiled"], found["timed"]) == ("hit", 0, []), found["why"]
    assert cold["outcome"] == "miss"
    assert cold["compiled"] >= 3
    assert found["got"] == cold["got"]  # to the bit
    # Probabilities of about 1/64; convolutions are in TF32 (3 digits), as torch has it by default.
    assert found["error"] < 1e-3
    found, cold = used(tmp_path, bundle, "train")
    assert (found["outcome"], found["compiled"], found["g++"]) == ("hit", 0, []), found["why"]
    assert found["timed"] == []
    assert cold["outcome"] == "miss"
    # A graph's two kernels, the step, and the norm that clips.
    assert cold["compiled"] >= 4
    assert found["got"] == cold["got"]
    # An update is 0.001 whatever the gradient's size; near 0 a gradient's last bits count.
    assert found["error"] < 1e-4


def used(tmp_path, bundle, what):
    """What a process found that has the bundle, and one that has not."""
    cases = ("user", str(bundle)), ("cold", "")
    done = (run(USE, tmp_path / f"{what} {home}", path, what) for home, path in cases)
    return [json.loads(text.splitlines()[-1]) for text in done]
