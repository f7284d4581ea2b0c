"""A package of an int8 net holds the kernels in its own code."""

import torch
import torch.nn.functional as F
from torch import nn

import ipex_inductor
from support.int8_nets import Conv, Linear, Quantize


class Net(nn.Module):
    """A convolution, a max pool and a linear layer, the last one from 8-bit integers to fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = Conv(3, 16, 3), Linear(16, 5)
        self.inputs = nn.ModuleList([Quantize(0.02, 115), Quantize(0.02, 0)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [B, 3, 10, 10] -> [B, 5]."""
        x = self.inputs[1](F.relu(self.conv(self.inputs[0](x))))
        return self.linear(F.max_pool2d(x, 8).flatten(1))


@torch.no_grad()
def test_a_loaded_package_gives_the_models_result(tmp_path) -> None:
    torch.manual_seed(0)
    model, x = Net().eval(), torch.randn(2, 3, 10, 10)
    path = str(tmp_path / "net.ipexbundle")
    ipex_inductor.package(model, (x,), path)
    weights = {**model.state_dict(), **dict(model.named_buffers())}
    run = ipex_inductor.load(path, weights=weights, allow_unsigned=True)
    # A tie of the second quantization moves a sum by a step of 0.02 times a weight below 0.25.
    assert (run(x) - model(x)).abs().max() < 0.006
    assert b"int8_convolve" in (tmp_path / "net.ipexbundle").read_bytes()
