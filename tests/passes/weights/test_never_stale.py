"""A weight that changed after compilation is seen, however it was written, in every mode."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ipex_inductor import refresh
from ipex_inductor.optim import fuse_step
from ipex_inductor.reporting import decisions


class Model(nn.Module):
    """Derived weights of every kind: folded and packed, packed, computed and packed."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.w, self.scale = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8))
        self.bn.running_mean.normal_()
        self.bn.running_var.uniform_(0.5, 2)

    def forward(self, x):
        y = F.relu(self.bn(self.conv(x))).mean((2, 3))
        return self.down(F.gelu(self.up(y))) @ (self.w * self.scale)


def step(make, model):
    """One step of an optimizer, with gradients of the eager model."""
    with torch.enable_grad():
        optimizer = make(model.parameters())
        model(torch.rand(2, 3, 8, 8, dtype=model.w.dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def swapping(write):
    def swapped(model):
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            write(model)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)

    return swapped


def load(model, **kwargs):
    other = Model().to(model.w.device, model.w.dtype)
    model.load_state_dict(other.state_dict(), **kwargs)


def double_unseen(model):
    for p in model.parameters():
        p.data.mul_(1.5)
    refresh(model)


def by_our_kernels(params):
    optimizer = Adam(params, lr=0.1)
    assert fuse_step(optimizer) is None
    return optimizer


SGD, Adam = torch.optim.SGD, torch.optim.AdamW
WRITES = {
    "in place": lambda m: [p.mul_(1.5) for p in m.parameters()],
    "load_state_dict": load,
    "load_state_dict, assigned": functools.partial(load, assign=True),
    "load_state_dict, swapped": swapping(load),
    "data": lambda m: [setattr(p, "data", p.data * 1.5) for p in m.parameters()],
    "reassigned": lambda m: [
        setattr(part, name, nn.Parameter(p * 1.5))
        for part in m.modules()
        for name, p in list(part.named_parameters(recurse=False))
    ],
    "plain step": functools.partial(step, functools.partial(SGD, lr=0.1, foreach=False)),
    "foreach step": functools.partial(step, functools.partial(Adam, lr=0.1, foreach=True)),
    "torch's fused step": functools.partial(step, functools.partial(Adam, lr=0.1, fused=True)),
    "fused step": functools.partial(step, by_our_kernels),
    "to another dtype": lambda m: m.to(torch.float64),
    "to another dtype, swapped": swapping(lambda m: m.to(torch.float64)),
    "to another dtype and back": lambda m: m.to(torch.bfloat16).to(torch.float32),
    "buffers": lambda m: [m.bn.running_mean.add_(1), m.bn.running_var.mul_(2)],
    "buffer reassigned": lambda m: setattr(m.bn, "running_mean", m.bn.running_mean + 1),
    "swapped": lambda m: torch.utils.swap_tensors(m.w, nn.Parameter(torch.randn(8, 8))),
    "refreshed": double_unseen,
}
MODES = {
    "reduce-overhead": {"mode": "reduce-overhead"},
    "max-autotune": {"mode": "max-autotune-no-cudagraphs"},
    "dynamic": {"dynamic": True},
}


@pytest.fixture(autouse=True)
def _strict(monkeypatch):
    monkeypatch.setenv("IPEX_STRICT", "1")


@torch.no_grad()
def check(fn, model, name):
    """Change the weights as WRITES[name] does; compiled and eager must agree before and after."""
    x = torch.rand(2, 3, 8, 8, dtype=model.w.dtype)

    def agree():
        # fp32 sums of some ten terms of order one, in another order
        torch.testing.assert_close(
            fn(x), model(x), rtol=1e-4, atol=1e-4, msg=lambda text: f"{name}: {text}"
        )

    agree()
    before = fn(x)
    WRITES[name](model)
    x = x.to(model.w.dtype)
    if not name.startswith("to another dtype"):
        assert not torch.equal(before, model(x)), "else this test shows nothing"
    agree()
    agree()


@pytest.mark.sampled
@pytest.mark.parametrize("name", WRITES)
def test_never_stale(name):
    model = Model().eval()
    fn = torch.compile(model, backend="ipex")
    for _ in range(2):
        check(fn, model, name)
    assert any(e.kind == "hoisted" for r in decisions.reports() for e in r.events)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.sampled
def test_never_stale_in_mode(mode):
    model = Model().eval()
    fn = torch.compile(model, backend="ipex", **MODES[mode])
    for name in WRITES:
        check(fn, model, name)
    assert any(e.kind == "hoisted" for r in decisions.reports() for e in r.events)
