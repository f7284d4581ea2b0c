"""Fused steps in processes of their own: who compiles, and who only reads."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Whatever starts a process raises one of these events.
SCRIPT = """
import json, logging, sys
import torch
from torch.optim import AdamW
from ipex_inductor.optim import fuse_step
from ipex_inductor.optim.planning import plan

torch.set_num_threads(1)
lines = []
log = logging.getLogger("ipex_inductor")
log.setLevel(logging.INFO)
log.handlers = [handler := logging.Handler()]
handler.emit = lambda record: lines.append(record.getMessage())

p = torch.nn.Parameter(torch.linspace(-1, 1, 37))
p.grad = torch.linspace(2, -1, 37)
optimizer = AdamW([p])
assert fuse_step(optimizer) is None
started = []
events = "subprocess.Popen os.system os.exec os.fork os.forkpty os.posix_spawn os.spawn".split()
sys.addaudithook(lambda event, args: started.append(event) if event in events else None)
for _ in range(3):
    optimizer.step()
left = list(plan(optimizer, {}).left.values())
print(json.dumps({"values": p.tolist(), "started": started, "left": left, "lines": lines}))
"""


def run(home, **env):
    root = str(Path(__file__).parents[2])
    given = os.environ | {"PYTHONPATH": root, "IPEX_HOME": str(home)} | env
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=given, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A home as the first process leaves it, and what that told."""
    home = tmp_path_factory.mktemp("home")
    return home, run(home)


WITHOUT = {"CXX": "/nowhere/g++", "PATH": "/nowhere"}


# Who has no compiler and builds something is told of: quickly that one stands for the other, too.
@pytest.mark.parametrize("env", [pytest.param({}, marks=pytest.mark.slow), WITHOUT], ids=str)
def test_the_second_process_starts_no_other(env, filled):
    """Neither does one without a compiler, where the first one's kernel is in the cache."""
    home, first = filled
    assert first["started"] == ["subprocess.Popen"] * 2  # for the step, and for who looks before
    assert not first["left"]
    again = run(home, **env)
    assert not again["started"]
    assert not again["left"]
    assert not [line for line in again["lines"] if "compiled" in line]
    assert again["values"] == first["values"]


@pytest.mark.slow  # 10 seconds; a home without a compiler is above, layers are in test_layers.py
def test_a_layer_that_is_only_read_serves_as_well(filled, tmp_path):
    home, first = filled
    again = run(tmp_path, IPEX_AOT_LAYERS=str(home / "kernels" / "1"), CXX="/nowhere")
    assert again["values"] == first["values"]
    assert not again["started"]
    assert not again["left"]


def test_without_a_compiler_torch_steps_and_that_is_said_once(tmp_path):
    alone = run(tmp_path, CXX="/nowhere/g++")
    assert not alone["started"]
    (reason,) = alone["left"]
    assert reason == "no C++ compiler was found, and no cache has the kernel"
    assert alone["lines"] == [
        f"tensors of an optimizer are looked at by Python before each step: {reason}",
        f"AdamW: torch itself steps 1 parameters: {reason}",
    ]
