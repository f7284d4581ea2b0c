"""Loops with tiles of rows and channels on a GPU: values, gradients, layout; that they fired."""

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from ipex_inductor.lowerings.pointwise.channel_tiles import FASTER, NAME
from ipex_inductor.target import device

pytestmark = pytest.mark.gpu

LAST = torch.channels_last
# Rows that tiles divide, and that they do not; tiles of 64 channels and of 128.
SHAPES = [(16, 64, 56, 56), (7, 256, 27, 29), (3, 320, 31, 5)]


class Block(nn.Module):
    """What is added to a batch norm, and a ReLU."""

    def __init__(self, channels):
        super().__init__()
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x, other):
        return torch.relu(self.norm(x) + other)


@pytest.fixture(autouse=True)
def _measured(monkeypatch):
    """Small images too."""
    arch = device.current("cuda").arch
    if arch not in FASTER:
        pytest.skip(f"nobody measured {arch}")
    monkeypatch.setitem(FASTER, arch, 1)


def step(model, fn, images):
    """The result, and gradients of the images, weight and bias."""
    images = [x.clone().requires_grad_() for x in images]
    y = fn(*images)
    (y.double() * torch.linspace(-1, 1, y.shape[1], device="cuda").view(-1, 1, 1)).sum().backward()
    return [y.detach(), *(x.grad for x in images), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_training(shape, dtype):
    """As near to fp64 as Inductor's own loops, whose sums and formulas these have."""
    torch.manual_seed(0)
    images = [torch.randn(shape, device="cuda").to(dtype, memory_format=LAST) for _ in range(2)]
    model = Block(shape[1]).cuda().train()
    plain, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    ours = step(model, torch.compile(model, backend="ipex", options={"strict": True}), images)
    assert counters["ipex"][NAME] >= 1
    theirs = step(plain, torch.compile(plain), images)
    truth = step(exact, exact, [x.double() for x in images])
    for mine, usual, want in zip(ours, theirs, truth, strict=True):
        assert mine.stride() == usual.stride()
        assert mine.dtype == usual.dtype
        size = want.abs().max()
        off, allowed = ((each - want).abs().max() / size for each in (mine, usual))
        assert off <= 1.2 * allowed + 1e-6  # sums of another order


@pytest.mark.parametrize("shape", [*SHAPES, (2, 128, 3, 3)], ids=str)
def test_inference(shape):
    """Bit for bit: the same operations, of each number by itself."""
    torch.manual_seed(0)
    images = [torch.randn(shape, device="cuda").bfloat16().to(memory_format=LAST) for _ in "xy"]
    model = Block(shape[1]).cuda().eval()
    model.norm.running_mean.uniform_()
    with torch.no_grad():
        ours = torch.compile(model, backend="ipex", options={"strict": True})(*images)
        assert counters["ipex"][NAME] == 1
        torch.compiler.reset()
        rules = {"strict": True, "rules": f"-{NAME}"}
        plain = torch.compile(model, backend="ipex", options=rules)(*images)
    assert counters["ipex"][NAME] == 1
    assert ours.stride() == plain.stride()
    assert torch.equal(ours, plain)
