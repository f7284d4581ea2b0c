"""A folded convolution whose error shows how its weights were rounded."""

import copy

import torch
from torch import nn


@torch.no_grad()
def measure_fold(dtype, device):
    """Return the relative error of a compiled convolution and batch norm, from fp64.

    Activations are near 1, as behind a ReLU, and the weights of a channel sum to nearly 0. So
    results are small, and the sum of a channel's rounding errors is most of their error.

    Args:
        dtype: of weights and activations.
        device: to run on.
    """
    torch.manual_seed(0)
    conv, norm = nn.Conv2d(64, 64, 3, bias=False), nn.BatchNorm2d(64)
    conv.weight -= conv.weight.mean((1, 2, 3), keepdim=True)
    norm.weight.uniform_(0.5, 1.5)
    net = nn.Sequential(conv, norm).eval().to(device, dtype)
    x = (1 + 0.1 * torch.randn(4, 64, 12, 12)).to(device, dtype)
    exact = copy.deepcopy(net).double()(x.double())
    torch.compiler.reset()
    result = torch.compile(net, backend="ipex", options={"strict": True})(x)
    return float((result.double() - exact).norm() / exact.norm())
