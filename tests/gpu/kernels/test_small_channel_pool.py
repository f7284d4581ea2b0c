"""A stem and its pool on a GPU: through Inductor, and in a model.

Values of many shapes are in `test_conv_templates.py`.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ipex_inductor.lowerings.select import library, selection
from ipex_inductor.reporting import decisions
from support.autotune.autotune_records import plant
from support.helpers import code_of, no_farther_off_than_eager
from support.op_checks import problem_here, verify

pytestmark = pytest.mark.gpu

PROBLEMS = {
    "ResNet": "16x3x224x224:L 64x3x7x7:L 64 stride=2,2 padding=3,3",
    "contiguous": "8x3x96x96 64x3x7x7:L 64 stride=2,2 padding=3,3",
    "odd": "5x3x111x77:L 40x3x7x7:L 40 stride=2,2 padding=3,3",
    "one channel": "3x1x64x200:L 96x1x5x3:L stride=1,2 padding=2,1 bias=None",
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_through_inductor(name, dtype):
    """Together or apart."""
    problem = problem_here(f"ipex.conv_pool.default {dtype} {PROBLEMS[name]}")
    calls = library.calls(problem)
    assert not all(call.apart for call in calls)
    verify(problem, calls)


class Stem(nn.Module):
    """How a ResNet begins, and a convolution that reads it."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
        self.next = nn.Conv2d(64, 64, 1)

    def forward(self, x):
        return self.next(F.max_pool2d(F.relu(self.norm(self.conv(x))), 3, 2, 1))


@torch.no_grad()
def test_in_a_model(tmp_path, monkeypatch):
    """By record, with weights that change, and with pixels that are no number."""

    def times(*_):
        raise AssertionError("something was to be measured")

    monkeypatch.setenv("IPEX_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(selection, "tune_locally", times)
    last = {"memory_format": torch.channels_last}
    model = Stem().cuda().eval().bfloat16().to(**last)
    for values in (model.norm.running_mean, model.norm.weight.data, model.norm.bias.data):
        values.normal_(0.5, 0.5)
    x = torch.randn(32, 3, 112, 96, device="cuda").bfloat16().to(**last)
    plant(tmp_path / "database", lambda: model(x))
    options = {"strict": True, "autotune_database": str(tmp_path / "database")}
    fn = torch.compile(model, backend="ipex", options=options)
    (code,) = code_of(fn, x)
    assert "stem_pool" in code
    said = [e.reason for r in decisions.reports() for e in r.events if e.kind == "choice"]
    assert sum("ipex.triton.stem_pool" in reason for reason in said) == 1
    for _ in range(2):
        no_farther_off_than_eager(fn, model, x)
        model.norm.bias.add_(1.0)
        model.conv.weight.mul_(2.0)
    for odd in (float("nan"), float("inf"), -float("inf")):
        x[3, 1, 50, 40] = odd
        assert torch.equal(fn(x).isnan(), model(x).isnan())
