"""Both of Inductor's graph caches hit in a second process, and what comes out is right."""

import json
import os
import subprocess
import sys

import pytest
import torch

RUN = """
import json, sys, torch
from torch import nn
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch.testing._internal.two_tensor import TwoTensor
from ipex_inductor.reporting import decisions

class Model(nn.Module):
    def __init__(self, subclass):
        super().__init__()
        both = (torch.randn(16), torch.randn(16))
        self.last = nn.Parameter(TwoTensor(*both)) if subclass else both[0]
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.bn = nn.BatchNorm1d(16)
        self.bn.running_var.uniform_(0.5, 2)
    def forward(self, x):
        return self.bn(self.down(F.gelu(self.up(x)))).softmax(-1) + self.last

def check(found, wanted):
    for part in ("a", "b"):
        ours, theirs = (getattr(t, part, t) for t in (found, wanted))
        torch.testing.assert_close(ours, theirs)

def run(aot=True, grad=False, scale=1.0, subclass=False, **options):
    torch.compiler.reset()
    counters.clear()
    decisions.clear()
    torch._functorch.config.enable_autograd_cache = aot
    torch.manual_seed(0)
    model = Model(subclass).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(scale)
    x = torch.randn(4, 16)
    fn = torch.compile(model, backend="ipex", options={"strict": True, **options})
    with torch.set_grad_enabled(grad):
        y = fn(x)
        check(y, model(x))
        if grad:
            y.square().sum().backward()
        else:
            model.up.weight.mul_(2)
            check(fn(x), model(x))
    inductor, aot = counters["inductor"], counters["aot_autograd"]
    return {
        "aot": [aot["autograd_cache_" + k] for k in ("hit", "miss", "bypass")],
        "fx": [inductor["fxgraph_cache_" + k] for k in ("hit", "miss", "bypass")],
        "fired": counters["ipex"]["linear+gelu"],
        "reports": [found.to_dict() for found in decisions.reports()],
    }

print(json.dumps([run(**step) for step in json.loads(sys.argv[1])]))
"""


pytestmark = pytest.mark.usefixtures("instructions_known")


def run(folder, *steps):
    """What one process counts at each of `steps`, which are arguments of its `run`."""
    env = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": str(folder),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
    }
    del env["TORCHINDUCTOR_AUTOGRAD_CACHE"]  # it would overrule what each step sets
    command = [sys.executable, "-c", RUN, json.dumps(steps)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


PLAIN, TRAINED, AS_IT_IS = {}, {"grad": True}, {"weight_prologue": False}
NO_AOT, SUBCLASS = {"aot": False}, {"subclass": True}


class Counted:
    """A process that fills a folder, one that finds it so, and what each counted at a step."""

    def __init__(self, folder, first, second):
        self._steps = first, second
        self._counts = run(folder, *first), run(folder, *second)

    def first(self, step):
        return self._counts[0][self._steps[0].index(step)]

    def second(self, step):
        return self._counts[1][self._steps[1].index(step)]


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    second = PLAIN, {"scale": 0.5}, NO_AOT, AS_IT_IS, SUBCLASS
    return Counted(tmp_path_factory.mktemp("inductor"), (PLAIN, AS_IT_IS, SUBCLASS), second)


def counts(done):
    return {name: done[name] for name in ("aot", "fx", "fired")}


def test_first_process_misses(counted):
    assert counts(counted.first(PLAIN)) == {"aot": [0, 1, 0], "fx": [0, 1, 0], "fired": 1}


def test_autograd_cache_hits(counted):
    """The prologue came out of the cache too: the weights changed, and the result is right."""
    assert counts(counted.second(PLAIN)) == {"aot": [1, 0, 0], "fx": [0, 0, 0], "fired": 0}


def test_one_entry_serves_every_checkpoint(counted):
    assert counted.second({"scale": 0.5})["aot"] == [1, 0, 0]


def test_a_graph_with_subclasses_comes_out_of_the_cache(counted):
    """What torch hands the prologue's code to read symbols from are no inputs of it then."""
    assert counted.second(SUBCLASS)["aot"] == [1, 0, 0]


def test_graph_cache_hits_when_the_autograd_cache_is_off(counted):
    assert counts(counted.second(NO_AOT)) == {"aot": [0, 0, 0], "fx": [1, 0, 0], "fired": 1}


def test_other_options_are_other_entries(counted):
    assert counted.first(AS_IT_IS)["aot"] == [0, 1, 0]


@pytest.mark.slow  # of which one measures
@pytest.mark.parametrize("options", [{"rules": "-*"}, {"mode": "max-autotune"}], ids=str)
def test_more_options_are_other_entries(tmp_path, options):
    _, other = run(tmp_path, PLAIN, options)
    assert other["aot"] == [0, 1, 0]


@pytest.mark.slow  # 20 seconds; in our own folder: test_graph_files.py
def test_training_hits_both(tmp_path):
    counted = Counted(tmp_path, (PLAIN, TRAINED), (TRAINED, TRAINED | NO_AOT))
    first, second = counted.first(TRAINED), counted.second(TRAINED)
    assert (first["aot"], first["fx"]) == ([0, 1, 0], [0, 2, 0])
    assert (second["aot"], second["fx"]) == ([1, 0, 0], [2, 0, 0])
    assert counted.second(TRAINED | NO_AOT)["fx"] == [2, 0, 0]


def test_another_version_of_us_is_another_entry(monkeypatch):
    """The only way our code enters Inductor's keys is the pass's uuid."""
    from ipex_inductor import config
    from ipex_inductor.compiler import request

    gm = torch.fx.symbolic_trace(torch.nn.Identity())
    asked = request.Request(gm, [], config.resolve(None, None, {}))
    ours = asked.identity()
    monkeypatch.setattr(request, "source_digest", lambda: "another")
    assert asked.identity() != ours


def test_what_was_decided_is_known_after_a_hit(counted):
    """The second process runs no passes: it has the events of the first, and says so."""
    first, second = counted.first(PLAIN)["reports"], counted.second(PLAIN)["reports"]
    assert [found["source"] for found in first] == ["passes"]
    assert [found["source"] for found in second] == ["cache"]
    assert second[0]["events"] == first[0]["events"]
    kinds = {event["kind"] for event in second[0]["events"]}
    assert {"fired", "hoisted"} <= kinds


def test_where_the_entry_has_no_events_nothing_is_claimed(counted):
    first, second = counted.first(AS_IT_IS)["reports"], counted.second(AS_IT_IS)["reports"]
    assert (first[0]["source"], second) == ("passes", [{"source": "", "events": []}])
