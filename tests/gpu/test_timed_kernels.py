"""Kernels that Inductor times at a call: in the graph's folder, and once a machine."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu

RUN = """
import json, torch, triton
from torch._dynamo.utils import counters

compiled = []  # by this process: what its graph needs at first, Inductor's workers compile
triton.knobs.compilation.listener = lambda **about: compiled.append(not about["cache_hit"])

def model(x):
    return (x.sin() + 1.5).relu().sum(-1), x.cos() * 2

options = {"strict": True, "coordinate_descent_tuning": True}
x = torch.randn(512, 1024, device="cuda")
call = torch.compile(model, backend="ipex", options=options)
with torch.no_grad():
    for _ in range(2):
        # A sum of 1024 values below 2.5 in another order: some roundings of 1e-7 each.
        torch.testing.assert_close(call(x), model(x), rtol=1e-5, atol=1e-5)
from ipex_inductor.reporting import decisions
events = [e.subject for r in decisions.reports() for e in r.events if e.kind == "cache"]
timed = counters["inductor"]["coordesc_tuning_bench"]
print(json.dumps({"outcome": events, "timed": timed, "compiled": sum(compiled)}))
"""


def run(base):
    (base / "tmp").mkdir(exist_ok=True)
    kept_out = ("TORCHINDUCTOR_", "TRITON_")
    env = {n: v for n, v in os.environ.items() if not n.startswith(kept_out)}
    env |= {"TMPDIR": str(base / "tmp"), "IPEX_HOME": str(base / "home")}
    env |= {"TORCHINDUCTOR_FX_GRAPH_CACHE": "1", "TORCHINDUCTOR_AUTOGRAD_CACHE": "1"}
    done = subprocess.run([sys.executable, "-c", RUN], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_second_process_neither_compiles_nor_times(tmp_path):
    first = run(tmp_path)
    assert first["outcome"] == ["miss"]
    assert first["timed"] > 0
    assert first["compiled"] > 0
    second = run(tmp_path)
    assert second == {"outcome": ["hit"], "timed": 0, "compiled": 0}
    assert not list((tmp_path / "tmp").rglob("__grp__*")), "no kernel lies in torch's usual folder"
    assert list((tmp_path / "home" / "torch").iterdir()) == []
