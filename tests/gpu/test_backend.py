"""Backend `ipex` on a GPU: values, graph capture, weights that change, several devices."""

import json
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

from ipex_inductor.config import MODES
from ipex_inductor.reporting import decisions
from support.helpers import Mlp, Plain, code_of

pytestmark = pytest.mark.gpu

# One rounding in another order: two ulp of values near 1.
ATOL = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}


class Scaled(nn.Module):
    """Weight-only work for the prologue, around a product and a batch norm."""

    def __init__(self, dtype):
        super().__init__()
        self.w = nn.Parameter(torch.randn(64, 64, dtype=dtype) / 8)
        self.scale = nn.Parameter(torch.ones(64, dtype=dtype))
        self.bn = nn.BatchNorm1d(64, dtype=dtype)

    def forward(self, x):
        return self.bn(F.gelu(x @ (self.w * self.scale)))


def compiled(model, **kwargs):
    return torch.compile(model, backend="ipex", **kwargs)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", ATOL, ids=str)
def test_inference_and_changed_weights(dtype, mode):
    model = Scaled(dtype).eval().cuda()
    x = torch.randn(32, 64, dtype=dtype, device="cuda")
    fn = compiled(model, mode=mode)
    with torch.no_grad():
        for _ in range(3):
            for _ in range(3):  # warm-up, capture, replay
                got = fn(x).clone()
                torch.testing.assert_close(got, model(x), rtol=0, atol=4 * ATOL[dtype])
            model.w.mul_(-1)
        model.w.data = torch.randn_like(model.w) / 8
        for _ in range(3):
            torch.testing.assert_close(fn(x).clone(), model(x), rtol=0, atol=4 * ATOL[dtype])
    assert [e for r in decisions.reports() for e in r.events if e.kind == "hoisted"]


def test_captured_graphs_read_refreshed_weights_without_a_new_capture():
    model = Scaled(torch.float32).eval().cuda()
    x = torch.randn(32, 64, device="cuda")
    fn = compiled(model, mode="reduce-overhead")
    with torch.no_grad():
        for _ in range(4):
            fn(x)
        skips = counters["inductor"]["cudagraph_skips"]
        recorded = counters["inductor"]["cudagraph_recorded_non_static_inputs"]
        model.scale.mul_(3)
        for _ in range(3):
            torch.testing.assert_close(fn(x).clone(), model(x), rtol=0, atol=1e-4)
    assert counters["inductor"]["cudagraph_skips"] == skips == 0
    assert counters["inductor"]["cudagraph_recorded_non_static_inputs"] == recorded


def test_training():
    model, twin = Mlp().cuda(), Mlp().cuda()
    twin.load_state_dict(model.state_dict())
    x = torch.randn(8, 32, device="cuda")
    compiled(model)(x).square().sum().backward()
    twin(x).square().sum().backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_a_model_on_two_devices():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Mlp(), Mlp().cuda()

        def forward(self, x):
            return self.second(self.first(x).cuda())

    model = Mixed().eval()
    x = torch.randn(8, 32)
    with torch.no_grad():
        torch.testing.assert_close(compiled(model)(x), model(x))
    assert counters["ipex"] == {"linear+gelu": 2}, "one on each device"


def test_what_we_cannot_improve_compiles_exactly_as_inductor():
    model, x = Plain().eval().cuda(), torch.randn(8, 32, device="cuda")

    def code(backend):
        torch.compiler.reset()
        with torch.no_grad():
            return code_of(torch.compile(model, backend=backend), x)

    assert code("ipex") == code("inductor")


CACHED = """
import json, torch
from torch._dynamo.utils import counters
torch.manual_seed(0)
w = torch.nn.Parameter(torch.randn(64, 64, device="cuda"))
bias = torch.nn.Parameter(torch.randn(64, device="cuda"))
model = lambda x: torch.relu(x @ (w * 2) + bias * bias)
x = torch.randn(32, 64, device="cuda")
fn = torch.compile(model, backend="ipex", mode="MODE")
with torch.no_grad():
    for _ in range(3):
        for _ in range(3):
            torch.testing.assert_close(fn(x).clone(), model(x))
        w.mul_(-0.5)
hits = counters["aot_autograd"]["autograd_cache_hit"]
print(json.dumps([hits, counters["inductor"]["cudagraph_skips"]]))
"""


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_second_process_hits_and_is_right(mode, tmp_path):
    env = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
    }
    for hits in (0, 1):
        run = subprocess.run(
            [sys.executable, "-c", CACHED.replace("MODE", mode)],
            env=env,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert run.returncode == 0, run.stderr
        assert json.loads(run.stdout.splitlines()[-1]) == [hits, 0]
