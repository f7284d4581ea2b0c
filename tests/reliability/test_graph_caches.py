"""Both of Inductor's graph caches hit in a second process, and what comes out is right."""

import json
import os
import subprocess
import sys

import pytest

RUN = """
import json, sys, torch
from torch import nn
import torch.nn.functional as F
from torch._dynamo.utils import counters
from ipex_inductor import decisions
options = json.loads(sys.argv[1])
grad, scale = options.pop("grad"), options.pop("scale")

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.bn = nn.BatchNorm1d(16)
        self.bn.running_var.uniform_(0.5, 2)
    def forward(self, x):
        return self.bn(self.down(F.gelu(self.up(x)))).softmax(-1)

torch.manual_seed(0)
model = Model().eval()
with torch.no_grad():
    for p in model.parameters():
        p.mul_(scale)
x = torch.randn(4, 16)
fn = torch.compile(model, backend="ipex", options={"strict": True, **options})
with torch.set_grad_enabled(grad):
    y = fn(x)
    torch.testing.assert_close(y, model(x))
    if grad:
        y.square().sum().backward()
    else:
        model.up.weight.mul_(2)
        torch.testing.assert_close(fn(x), model(x))
inductor = counters["inductor"]
print(json.dumps({
    "aot": [counters["aot_autograd"]["autograd_cache_" + k] for k in ("hit", "miss", "bypass")],
    "fx": [inductor["fxgraph_cache_" + k] for k in ("hit", "miss", "bypass")],
    "fired": counters["ipex"]["linear+gelu"],
    "reports": [found.to_dict() for found in decisions.reports()],
}))
"""


def run(folder, aot=True, grad=False, scale=1.0, **options):
    env = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(folder),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": str(int(aot)),
    }
    argument = json.dumps({"grad": grad, "scale": scale, **options})
    done = subprocess.run(
        [sys.executable, "-c", RUN, argument], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    """A folder that one process has filled, and what that process counted."""
    folder = tmp_path_factory.mktemp("inductor")
    return folder, run(folder)


def counts(done):
    return {name: done[name] for name in ("aot", "fx", "fired")}


def test_first_process_misses(warm):
    assert counts(warm[1]) == {"aot": [0, 1, 0], "fx": [0, 1, 0], "fired": 1}


def test_autograd_cache_hits(warm):
    """The prologue came out of the cache too: the weights changed, and the result is right."""
    assert counts(run(warm[0])) == {"aot": [1, 0, 0], "fx": [0, 0, 0], "fired": 0}


def test_one_entry_serves_every_checkpoint(warm):
    assert run(warm[0], scale=0.5)["aot"] == [1, 0, 0]


def test_graph_cache_hits_when_the_autograd_cache_is_off(warm):
    done = counts(run(warm[0], aot=False))
    assert done == {"aot": [0, 0, 0], "fx": [1, 0, 0], "fired": 1}


@pytest.mark.parametrize(
    "options", [{"rules": "-*"}, {"weight_prologue": False}, {"mode": "max-autotune"}], ids=str
)
def test_other_options_are_other_entries(warm, options):
    assert run(warm[0], **options)["aot"] == [0, 1, 0]


def test_training_hits_both(tmp_path):
    first = run(tmp_path, grad=True)
    assert (first["aot"], first["fx"]) == ([0, 1, 0], [0, 2, 0])
    second = run(tmp_path, grad=True)
    assert (second["aot"], second["fx"]) == ([1, 0, 0], [2, 0, 0])
    assert run(tmp_path, grad=True, aot=False)["fx"] == [2, 0, 0]


def test_another_version_of_us_is_another_entry(warm, monkeypatch):
    """The only way our code enters Inductor's keys is the pass's uuid."""
    from ipex_inductor import backend

    config = backend.resolve(None, None, {})
    ours = backend._identity(config, False, False, [])
    monkeypatch.setattr(backend, "source_digest", lambda: "another")
    assert backend._identity(config, False, False, []) != ours


def test_what_was_decided_is_known_after_a_hit(warm):
    """The second process runs no passes: it has the events of the first, and says so."""
    first, second = warm[1]["reports"], run(warm[0])["reports"]
    assert [found["source"] for found in first] == ["passes"]
    assert [found["source"] for found in second] == ["cache"]
    assert second[0]["events"] == first[0]["events"]
    kinds = {event["kind"] for event in second[0]["events"]}
    assert {"fired", "hoisted"} <= kinds


def test_where_the_entry_has_no_events_nothing_is_claimed(tmp_path):
    first, second = (run(tmp_path, weight_prologue=False)["reports"] for _ in range(2))
    assert (first[0]["source"], second) == ("passes", [{"source": "", "events": []}])
