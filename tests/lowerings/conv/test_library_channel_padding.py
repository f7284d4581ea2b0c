"""Convolutions of few channels by the library, on images filled up to whole vectors."""

import pytest
import torch
import torch.nn.functional as F

from ipex_inductor.lowerings.problem import selector_hook
from ipex_inductor.lowerings.problem.node_problem import problem_of
from ipex_inductor.lowerings.select import library
from support.meta_device import H200, placed, targets

pytestmark = pytest.mark.unit

LAST = torch.channels_last


@pytest.fixture(autouse=True)
def _on_an_h200(monkeypatch):
    monkeypatch.setattr(selector_hook, "arch_of", lambda device: H200)


def padded(node):
    """The choice of it, if there is one."""
    known = library.calls(problem_of(node, H200, {}))
    found = [call for call in known if call.name == "aten.convolution_padded"]
    return (found[0].compute if found else None), "choice", "as told"


@pytest.mark.parametrize(
    ("channels", "dtype", "found"),
    [
        (12, torch.bfloat16, 1),
        (5, torch.float16, 1),
        (4, torch.float16, 0),
        (16, torch.bfloat16, 0),
        (12, torch.float32, 0),
        (6, torch.float32, 1),
    ],
)
@torch.no_grad()
def test_images_and_weights_are_filled_up(channels, dtype, found):
    """The weight once, as that is a weight's alone; behind it what was behind the convolution."""
    x = torch.randn(2, channels, 9, 9).to(dtype).to(memory_format=LAST)
    weight = torch.randn(16, channels, 3, 3).to(dtype).to(memory_format=LAST)
    bias = torch.randn(16).to(dtype)

    def fn(x, weight, bias):
        return F.relu(F.conv2d(x, weight, bias, padding=1))

    gm, _ = placed(fn, x, weight, bias, choose=padded, weights=["weight_1", "bias_1"])
    assert targets(gm).count("aten.constant_pad_nd.default") == 2 * found
    made, wanted = gm(x, weight, bias), fn(x, weight, bias)
    # Sums of at most 108 products, in another order, rounded once where torch rounds twice.
    torch.testing.assert_close(made, wanted, rtol=2e-2, atol=0.1)
    assert made.stride() == wanted.stride()
