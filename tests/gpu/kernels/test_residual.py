"""A block's last convolution and its shortcut on a GPU: through Inductor, and in a model.

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
    "by 1": "32x64x28x28:L 256x64x1x1:L 256 32x64x28x28:L 256x64x1x1:L stride=1,1",
    "by 2": "128x128x14x14:L 384x128x1x1:L 384 128x256x28x28:L 384x256x1x1:L stride=2,2",
    "odd": "32x72x13x11:L 130x72x1x1:L 130 32x40x26x22:L 130x40x1x1:L stride=2,2",
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_through_inductor(name, dtype):
    """Together or apart."""
    problem = problem_here(f"ipex.conv_shortcut.default {dtype} {PROBLEMS[name]}")
    calls = library.calls(problem)
    assert not all(call.apart for call in calls)
    verify(problem, calls)


def normed(inputs, outputs, window, stride=1):
    conv = nn.Conv2d(inputs, outputs, window, stride, window // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs))


class Block(nn.Module):
    """The first block of a stage of ResNet-50."""

    def __init__(self, inputs, width, stride):
        super().__init__()
        self.reduced, self.window = normed(inputs, width, 1), normed(width, width, 3, stride)
        self.expanded, self.shortcut = (
            normed(width, 4 * width, 1),
            normed(inputs, 4 * width, 1, stride),
        )

    def forward(self, x):
        made = F.relu(self.window(F.relu(self.reduced(x))))
        return F.relu(self.expanded(made) + self.shortcut(x))


def blocks():
    """Of two stages, with statistics of batch norms that change something."""
    net = nn.Sequential(Block(64, 64, 1), Block(256, 128, 2))
    for norm in (m for m in net.modules() if isinstance(m, nn.BatchNorm2d)):
        for values in (norm.running_mean, norm.weight.data, norm.bias.data):
            values.normal_(0.5, 0.5)
    return net


@torch.no_grad()
def test_in_a_model(tmp_path, monkeypatch):
    """By record, with weights that change: both shortcuts are in the kernel that adds them."""

    def times(*_):
        raise AssertionError("something was to be measured")

    monkeypatch.setenv("IPEX_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(selection, "tune_locally", times)
    last = {"memory_format": torch.channels_last}
    model = blocks().cuda().eval().bfloat16().to(**last)
    x = torch.randn(32, 64, 28, 28, device="cuda").bfloat16().to(**last)
    plant(tmp_path / "database", lambda: model(x))
    options = {"strict": True, "autotune_database": str(tmp_path / "database")}
    fn = torch.compile(model, backend="ipex", options=options)
    (code,) = code_of(fn, x)
    assert "shortcut" in code
    said = [e.reason for r in decisions.reports() for e in r.events if e.kind == "choice"]
    assert sum("ipex.triton.shortcut" in reason for reason in said) == 2
    for _ in range(2):
        no_farther_off_than_eager(fn, model, x)
        for block in model:
            block.shortcut[1].bias.add_(1.0)
            block.shortcut[0].weight.mul_(2.0)
            block.expanded[0].weight.mul_(0.5)
