"""Errors of folded weights cancel: a folded network is about as exact as an unfolded one."""

import copy
import itertools

import pytest
import torch
from torch import nn

from ipex_inductor.ops.pointwise.balanced_rounding import round_balanced

pytestmark = pytest.mark.gpu


def test_sums_of_errors_are_as_small_as_on_a_cpu():
    torch.manual_seed(0)
    weight = torch.randn(64, 128, 3, 3, dtype=torch.float64)
    for dtype in (torch.bfloat16, torch.float16):
        there = round_balanced(weight.cuda(), dtype, 0).cpu()
        here = round_balanced(weight, dtype, 0)
        nearest = weight.to(dtype)
        errors = [(w.double() - weight).flatten(1) for w in (there, here, nearest)]
        sums = [error.sum(1).abs().mean() for error in errors]
        assert sums[0] < 0.1 * sums[2]
        assert sums[1] < 0.1 * sums[2]


class Residual(nn.Module):
    """A bottleneck with batch norms."""

    def __init__(self, width):
        super().__init__()
        sizes = [(4 * width, width, 1), (width, width, 3), (width, 4 * width, 1)]
        convs = [nn.Conv2d(i, o, k, padding=k // 2, bias=False) for i, o, k in sizes]
        layers = ((c, nn.BatchNorm2d(c.out_channels), nn.ReLU()) for c in convs)
        self.layers = nn.Sequential(*itertools.chain.from_iterable(layers))

    def forward(self, x):
        return torch.relu(x + self.layers[:-1](x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_folded_network_is_about_as_exact_as_inductors(dtype):
    torch.manual_seed(0)
    net = nn.Sequential(*(Residual(64) for _ in range(6)), nn.AdaptiveAvgPool2d(1))
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
    net = net.eval().cuda().to(dtype).to(memory_format=torch.channels_last)
    x = torch.randn(4, 256, 28, 28, device="cuda").relu().to(dtype)
    x = x.to(memory_format=torch.channels_last)
    with torch.no_grad():
        exact = copy.deepcopy(net).double()(x.double())
        errors = {}
        for backend in ("inductor", "ipex"):
            torch.compiler.reset()
            y = torch.compile(net, backend=backend)(x)
            errors[backend] = float((y.double() - exact).norm() / exact.norm())
    # Rounding to nearest, the folded network is farther off by a third.
    assert errors["ipex"] < 1.2 * errors["inductor"], errors
