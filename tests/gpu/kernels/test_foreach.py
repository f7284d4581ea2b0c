"""Conversions and counters of a training step on a GPU in a kernel each: to the bit as without."""

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from ipex_inductor.passes.training import foreach as rule

pytestmark = pytest.mark.gpu

LAST = torch.channels_last


class Net(nn.Module):
    """Convolutions with batch norms, then linear layers."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Conv2d(64, 64, k, padding=k // 2, bias=False) for k in (1, 3, 1, 3, 1)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(64) for _ in self.convs)
        self.last = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 10))

    def forward(self, x):
        with torch.autocast("cuda", torch.bfloat16):
            for conv, norm in zip(self.convs, self.norms, strict=True):
                x = x + torch.relu(norm(conv(x)))
            return self.last(x.mean((2, 3))).float().square().mean()


def steps(model, x, **options):
    """Losses, the last gradients, and buffers, after three steps."""
    compiled = torch.compile(model, backend="ipex", options={"strict": True, **options})
    losses = []
    for _ in range(3):
        model.zero_grad()
        loss = compiled(x)
        loss.backward()
        losses.append(loss.detach())
    grads = {name: p.grad for name, p in model.named_parameters()}
    return {"losses": torch.stack(losses), **grads, **dict(model.named_buffers())}


@pytest.mark.parametrize("layout", [LAST, torch.contiguous_format], ids=str)
def test_to_the_bit_what_it_is_without(layout, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    torch.manual_seed(0)
    model = Net().cuda().to(memory_format=layout).train()
    twin = copy.deepcopy(model)
    x = torch.randn(8, 64, 28, 28, device="cuda").to(memory_format=layout)
    # Which of several kernels is fastest of a reduction is measured, and decides its sums' order.
    # As an option it holds for a backward, too, that autograd's thread compiles.
    ours = steps(model, x, deterministic=True)
    assert counters["ipex"][rule.NAME] == 3
    theirs = steps(twin, x, deterministic=True, rules=f"-{rule.NAME}")
    assert counters["ipex"][rule.NAME] == 3
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), (name, (ours[name] - value).abs().max())
        assert ours[name].stride() == value.stride(), name
    assert ours["norms.0.num_batches_tracked"] == 3
