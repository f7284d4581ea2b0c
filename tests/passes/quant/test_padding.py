"""Zeros padded before a convolution of integers, and bounds of quantization."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ipex_inductor.ops.quant.int8_borders import pad_sizes
from ipex_inductor.reporting import decisions
from support.int8_nets import Conv, Quantize


class PaddedNet(nn.Module):
    """Convolutions, one of them depthwise, behind padding that differs from side to side."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.first = Conv(8, 16, 3, stride=2)
        self.second = Conv(16, 16, 5, padding=(1, 2), groups=16)
        self.inputs = nn.ModuleList([Quantize(0.02, 117), Quantize(0.05, 30)])
        self.value = value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [B, 8, H, W]; pads are left, right, top, bottom."""
        x = self.first(F.pad(self.inputs[0](x), (0, 1, 2, 3), value=self.value))
        return self.second(F.pad(self.inputs[1](x), (1, 0, 0, 0), value=self.value))


def int8_convolutions() -> int:
    counts = decisions.reports()[-1].count("fired")
    return sum(count for name, count in counts.items() if name.startswith("int8 conv"))


@pytest.mark.sampled("0.0-2", "0.5-0")
@torch.no_grad()
@pytest.mark.parametrize(("value", "expected"), [(0.0, 2), (0.5, 0)])
def test_padding_is_part_of_a_call_if_it_is_zero(value, expected) -> None:
    model, x = PaddedNet(value).eval(), torch.randn(2, 8, 13, 14)
    result = torch.compile(model, backend="ipex", options={"strict": True})(x)
    truth = model(x)
    # Sums are exact in the kernel and rounded in eager; no second quantization follows.
    torch.testing.assert_close(result, truth, rtol=1e-5, atol=1e-5)
    assert result.stride() == truth.stride()
    assert int8_convolutions() == expected


def test_sizes_of_padding() -> None:
    """`torch.nn.functional.pad` begins with the last dimension."""
    assert pad_sizes([1, 2], 2) == [2, 2, 1, 1]
    assert pad_sizes([1, 2, 3, 4], 2) == [2, 4, 1, 3]


@torch.no_grad()
def test_bounds_hold_for_all_numbers() -> None:
    """Inductor's own code for CPUs ignores bounds of 7 bits, and overflows."""
    model = Quantize(0.01, 64)
    model.words = (0, 127, torch.uint8)
    inf = float("inf")
    x = torch.tensor([-1e30, inf, -inf, 5.0, 3e8, 0.005, 0.015, 0.025, -0.005, 0.0])
    result = torch.compile(model, backend="ipex", options={"strict": True})(x)
    torch.testing.assert_close(result, model(x), rtol=0, atol=0)
    assert decisions.reports()[-1].count("fired") == {"quantize_per_tensor": 1}
