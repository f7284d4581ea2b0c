"""A package built by a process that sees no GPU, loaded by one that does: nothing is compiled."""

import json
import os
import subprocess
import sys

import pytest

from ipex_inductor.aot_cache import toolkit

pytestmark = pytest.mark.gpu

MAKE = """
import torch
from torch import nn
import torch.nn.functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32)
        self.linear, self.after = nn.Linear(32, 64), nn.LayerNorm(64)
        self.register_buffer("shift", torch.arange(64.0) / 64, persistent=False)

    def forward(self, x, *, scale):
        y = F.relu(self.norm(self.conv(x))).mean((2, 3))
        return {"y": F.gelu(self.after(self.linear(y))) * scale + self.shift}

def make():
    torch.manual_seed(0)
    model = Net().eval()
    nn.init.uniform_(model.norm.running_var, 0.5, 2)
    return model, torch.randn(4, 16, 32, 32)
"""
BUILD = """
import sys, ipex_inductor
from ipex_inductor.target.device import find_target

assert not torch.cuda.is_available()
model, x = make()
gpu = find_target(sys.argv[2])
ipex_inductor.package(model, (x,), sys.argv[1], kwargs={"scale": 2}, targets=[gpu])
"""
USE = """
import json, sys, ipex_inductor
model, x = make()
model, x = model.cuda(), x.cuda()
loaded = ipex_inductor.load(sys.argv[1], weights=model.state_dict(), allow_unsigned=True)
errors = []
with torch.no_grad():
    for factor in (1, 0.5):
        model.conv.weight.mul_(factor)
        loaded.load_weights(model.state_dict())
        got, exact = loaded(x, scale=2)["y"], model.double()(x.double(), scale=2)["y"]
        model.float()
        errors.append((got - exact).abs().max().item())
wrong = ""
try:
    loaded(x.cpu(), scale=2)
except ipex_inductor.errors.ArgumentError as error:
    wrong = str(error)
heavy = [n for n in ("torch._dynamo", "torch._inductor", "triton") if n in sys.modules]
print(json.dumps({"errors": errors, "imported": heavy, "device": str(got.device), "wrong": wrong}))
"""


def run(program, home, *arguments, **variables):
    ours = ("TORCHINDUCTOR_", "TRITON_CACHE_DIR", "IPEX_")
    env = {n: v for n, v in os.environ.items() if not n.startswith(ours)}
    command = [sys.executable, "-c", MAKE + program, *arguments]
    env |= {"IPEX_HOME": str(home), **variables}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_what_was_built_without_a_gpu_is_loaded_and_right(tmp_path):
    from ipex_inductor.target.device import current, table

    here = str(current("cuda"))
    if here not in map(str, table()):
        pytest.skip(f"{here} is in no table")
    command = [toolkit.compiler() or "g++", "-print-file-name=libstdc++.so"]
    if not os.path.isabs(subprocess.run(command, capture_output=True, text=True).stdout.strip()):
        pytest.skip(f"{command[0]} links no libstdc++.so: what it makes cannot be loaded by torch")
    bundle = str(tmp_path / "net.ipexbundle")
    run(BUILD, tmp_path / "builder", bundle, here, CUDA_VISIBLE_DEVICES="")
    found = json.loads(run(USE, tmp_path / "user", bundle).splitlines()[-1])
    assert found["imported"] == []
    assert found["device"] == "cuda:0"
    assert "float32[4, 16, 32, 32] on cuda" in found["wrong"]
    assert max(found["errors"]) < 1e-3  # of numbers of about 1; convolutions in TF32 (3 digits)
