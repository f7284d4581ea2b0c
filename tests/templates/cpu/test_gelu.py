"""GELU of our kernels for CPUs over all it may meet, which products of random numbers do not."""

import math

import pytest
import torch
import torch.nn.functional as F

from ipex_inductor.templates.cpu import blocked

pytestmark = pytest.mark.skipif(blocked.why_not() is not None, reason=f"{blocked.why_not()}")


@pytest.mark.parametrize(("unary", "form"), [("gelu", "none"), ("gelu_tanh", "tanh")])
def test_gelu_of_any_number(unary: str, form: str) -> None:
    """As torch's in fp64: between pieces, behind the last, of no number and of infinities too."""
    odd = [0.0, -0.0, 1e-30, -1e-30, 3e38, -3e38, math.inf, -math.inf, math.nan]
    x = torch.cat([torch.tensor(odd), torch.linspace(-7, 7, 5000)])  # the bias of zeros
    columns, nothing = len(x), torch.zeros(1, 2)
    weight = torch.ops.ipex.blocks(torch.zeros(columns, 2), 64)
    out = torch.full((1, columns), 123.0)
    word = blocked.UNARY.index(unary)
    blocked.call(nothing, weight, x, columns, True, 0, word, out=out)
    truth = F.gelu(x.double(), approximate=form)
    # What x is multiplied by is within 2e-7 and a rounding, and x up to 5.6 where that is seen.
    torch.testing.assert_close(out[0].double(), truth, rtol=4e-7, atol=1.5e-6, equal_nan=True)
