"""A package of a model on quantized weights holds the kernel in its own code."""

from pathlib import Path

import pytest
import torch
from torch import nn

import ipex_inductor
from ipex_inductor.ops.quant.weight_only import Scheme
from ipex_inductor.templates.cpu import weight_only
from support.weight_only_ops import Operands, make_operands


class Layer(nn.Module):
    """A layer on a quantized weight."""

    def __init__(self, operands: Operands) -> None:
        super().__init__()
        for name in ("weight", "scales", "zeros", "bias"):
            self.register_buffer(name, getattr(operands, name))
        self.scheme = operands.scheme

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, K] -> [rows, N]."""
        tensors = self.weight, self.scales, self.zeros, None, self.bias
        return torch.ops.ipex.weight_only_linear(x, *tensors, *self.scheme).relu()


@pytest.mark.slow  # 35 s; kernels in packages: test_int8_package.py, test_fp8_package.py
@torch.no_grad()
def test_a_loaded_package_gives_the_models_result(tmp_path: Path) -> None:
    torch.manual_seed(0)
    weight_only.register()
    model = nn.Sequential(
        Layer(make_operands(2, 96, 64, Scheme("int4", 32, "int8"), zeros=True, bias=True)),
        Layer(make_operands(2, 64, 10, Scheme("nf4", 64, "bfloat16"))),
    ).eval()
    x = torch.randn(3, 96)
    path = str(tmp_path / "net.ipexbundle")
    ipex_inductor.package(model, (x,), path)
    weights = {**model.state_dict(), **dict(model.named_buffers())}
    run = ipex_inductor.load(path, weights=weights, allow_unsigned=True)
    # The same kernel, compiled with other flags: fp32 sums differ by some roundings of 2^-24.
    torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-5)
    assert b"weight_only_linear" in (tmp_path / "net.ipexbundle").read_bytes()
