"""Linear layers on inputs that are not contiguous, which autograd traces as products of batches."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ipex_inductor.reporting import decisions
from support.int8_nets import Linear, Quantize


class Tokens(nn.Module):
    """Two linear layers on the transposed pixels of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Linear(8, 24), Linear(24, 8, bias=False)
        self.inputs = nn.ModuleList([Quantize(0.02, 117), Quantize(0.02, 0)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [B, 8, H, W] -> [B, H * W, 8]."""
        x = self.inputs[0](x).flatten(2).transpose(1, 2)
        x = self.inputs[1](F.relu(self.first(x)))
        return self.second(x.transpose(1, 2).contiguous().transpose(1, 2))


@pytest.mark.sampled("True")
@torch.no_grad()
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_linear_layer_of_batches_is_one_call(dynamic) -> None:
    torch.manual_seed(0)
    model = Tokens().eval()
    run = torch.compile(model, backend="ipex", dynamic=dynamic, options={"strict": True})
    for batch in (2, 3) if dynamic else (2,):
        x = torch.randn(batch, 8, 5, 4 + batch)
        result, truth = run(x), model(x)
        # A tie of the second quantization moves a sum by a step of 0.02 times a weight below 0.21.
        assert (result - truth).abs().max() < 0.0042
        assert (torch.isclose(result, truth, rtol=1e-5, atol=1e-5)).float().mean() > 0.98
        assert result.stride() == truth.stride()
    counts = decisions.reports()[-1].count("fired")
    assert counts["int8 linear+relu+quantize"] == counts["int8 linear"] == 1
