"""Errors of folded weights cancel in each output channel, on a GPU."""

import pytest
import torch

from ipex_inductor.ops.pointwise.balanced_rounding import round_balanced
from ipex_inductor.passes.layout import folding
from support.folded import measure_fold

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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_balanced_weights_are_nearer(monkeypatch, dtype):
    """Errors that add up are most of a channel's error; a third is what other rounding leaves."""
    balanced = measure_fold(dtype, "cuda")
    monkeypatch.setattr(folding, "_balances_on", lambda device: False)
    assert balanced < measure_fold(dtype, "cuda") / 3
