"""Max pools in training on a GPU: values of both kernels, and a net's step against fp64."""

import copy

import pytest
import torch
from torch import nn

from ipex_inductor.passes.training import pool
from ipex_inductor.reporting import decisions
from ipex_inductor.target import device
from support.cases import pool_cases
from support.helpers import code_of

pytestmark = pytest.mark.gpu


def test_values():
    """Against float64, into memory full of NaN."""
    check(pool_cases.CASES)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", pool_cases.DTYPES)
def test_values_of_every_shape(dtype):
    """Of every shape also the forward, which leaves parts of windows at the end to Inductor."""
    for each in pool_cases.CASES:
        check([each | {"dtype": dtype}, each | {"dtype": dtype, "ceil": False}])


def check(cases):
    wrong = [
        c for c in cases if pool_cases.differs(c, "cuda") + pool_cases.forward_differs(c, "cuda")
    ]
    assert not wrong


class Net(nn.Module):
    """As residual nets begin."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
        self.pool, self.last = nn.MaxPool2d(3, 2, 1), nn.Conv2d(64, 32, 1)

    def forward(self, x):
        return self.last(self.pool(torch.relu(self.norm(self.conv(x)))))


def step(model, fn, x, dtype):
    """The result, all gradients and the running statistics."""
    with torch.autocast("cuda", dtype, enabled=dtype is not None):
        y = fn(x)
    (y.double() * torch.linspace(-1, 1, y.shape[1], device="cuda").view(-1, 1, 1)).mean().backward()
    named = {name: p.grad for name, p in model.named_parameters()}
    return {"y": y.detach(), **named, **dict(model.named_buffers())}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16], ids=str)
def test_training(dtype, monkeypatch):
    """One kernel in the forward, one in the backward."""
    if device.current("cuda").arch not in pool.FASTER:
        pytest.skip("nobody measured it here")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.manual_seed(0)
    model = Net().cuda().to(memory_format=torch.channels_last).train()
    eager, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    x = torch.randn(16, 3, 113, 97, device="cuda").to(memory_format=torch.channels_last)
    compiled = torch.compile(model, backend="ipex", options={"strict": True})
    made = {}
    forward, backward = code_of(lambda: made.update(step(model, compiled, x, dtype)))
    events = [e for r in decisions.reports() for e in r.events if e.subject == pool.NAME]
    assert [e.kind for e in events] == ["fired"]
    assert "one kernel" in events[0].reason
    assert "arg_RSTD" in forward
    assert "arg_GRAD" in backward
    theirs, truth = step(eager, eager, x, dtype), step(exact, exact, x.double(), None)
    for name, want in truth.items():
        if want.is_floating_point():
            size = want.abs().max()
            off, usual = ((each[name] - want).abs().max() / size for each in (made, theirs))
            # Where neighbours are nearly equal, who is the largest hangs on the last bit.
            assert off <= 2 * usual + 1e-5, (name, off, usual)
