"""Batch norms folded in the graph: values, reasons, and parameters that count later."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ipex_inductor.quantization.batch_norm import fold_batch_norms
from ipex_inductor.quantization.capture import capture_graph
from support.int8_models import operators

# Of values around 1: two roundings of the weight more than without folding, summed over the window.
CLOSE = {"rtol": 1e-4, "atol": 1e-5}

PAIRS = {
    "conv1d": (nn.Conv1d(4, 6, 3), nn.BatchNorm1d(6), (1, 4, 9)),
    "conv2d": (nn.Conv2d(4, 6, 3, bias=False), nn.BatchNorm2d(6), (1, 4, 9, 9)),
    "depthwise": (nn.Conv2d(4, 8, 3, groups=4), nn.BatchNorm2d(8), (1, 4, 9, 9)),
    "same": (nn.Conv2d(4, 6, 3, padding="same"), nn.BatchNorm2d(6), (1, 4, 9, 9)),
    "conv3d": (nn.Conv3d(4, 6, 3), nn.BatchNorm3d(6), (1, 4, 5, 5, 5)),
    "transposed": (nn.ConvTranspose2d(4, 6, 3, 2), nn.BatchNorm2d(6), (1, 4, 9, 9)),
    "transposed in groups": (
        nn.ConvTranspose2d(4, 6, 3, 2, groups=2, bias=False),
        nn.BatchNorm2d(6),
        (1, 4, 9, 9),
    ),
    "transposed3d": (nn.ConvTranspose3d(4, 6, 2), nn.BatchNorm3d(6), (1, 4, 3, 3, 3)),
    "linear": (nn.Linear(4, 6), nn.BatchNorm1d(6), (2, 4)),
    "no affine": (nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6, affine=False), (1, 4, 9, 9)),
}


def fill(norm):
    norm.running_mean.uniform_(-1, 1)
    norm.running_var.uniform_(0.25, 4)
    if norm.affine:
        nn.init.uniform_(norm.weight, 0.5, 2)
        nn.init.uniform_(norm.bias, -1, 1)
    return norm


def fold(model, shape):
    captured = capture_graph(model, (torch.randn(*shape),))
    folds = fold_batch_norms(captured.graph)
    captured.recompile()
    return captured, folds


@pytest.mark.parametrize("kind", PAIRS)
def test_folded(kind):
    layer, norm, shape = PAIRS[kind]
    model = nn.Sequential(layer, fill(norm)).eval()
    captured, (done,) = fold(model, shape)
    assert done.layer.startswith("0:")
    assert "batch_norm" not in operators(captured)
    x = torch.randn(3, *shape[1:])
    with torch.no_grad():
        torch.testing.assert_close(captured(x), model(x), **CLOSE)
    assert captured.state_dict().keys() == model.state_dict().keys()


def test_parameters_that_change_count():
    model = nn.Sequential(nn.Conv2d(4, 6, 3), fill(nn.BatchNorm2d(6))).eval()
    captured, _ = fold(model, (1, 4, 9, 9))
    x = torch.randn(2, 4, 9, 9)
    with torch.no_grad():
        model[0].weight.mul_(2)
        model[1].running_var.mul_(3)
        torch.testing.assert_close(captured(x), model(x), **CLOSE)


def test_low_precision_stays_low():
    model = nn.Sequential(nn.Conv2d(4, 6, 3), fill(nn.BatchNorm2d(6))).eval().bfloat16()
    captured = capture_graph(model, (torch.randn(1, 4, 9, 9).bfloat16(),))
    fold_batch_norms(captured.graph)
    captured.recompile()
    x = torch.randn(2, 4, 9, 9).bfloat16()
    with torch.no_grad():  # bfloat16 has 8 bits; folding rounds the weights once more
        torch.testing.assert_close(captured(x), model(x), rtol=2**-5, atol=2**-5)


class Uses(nn.Module):
    """A convolution whose output has two readers."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 1), fill(nn.BatchNorm2d(4))

    def forward(self, x):
        y = self.conv(x)
        return self.norm(y) + y


@pytest.mark.parametrize(
    ("model", "shape", "reason"),
    [
        (Uses(), (1, 4, 5, 5), "other users"),
        (nn.Sequential(fill(nn.BatchNorm2d(4)), nn.Conv2d(4, 4, 1)), (1, 4, 5, 5), "right before"),
        (nn.Sequential(nn.Linear(4, 4), fill(nn.BatchNorm1d(3))), (1, 3, 4), "right before"),
        (
            nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4, track_running_stats=False)),
            (1, 4, 5, 5),
            "statistics of the batch",
        ),
    ],
    ids=["two readers", "first", "other dimension", "no statistics"],
)
def test_not_folded(model, shape, reason):
    captured, (done,) = fold(model.eval(), shape)
    assert not done.layer
    assert reason in done.reason
    x = torch.randn(3, *shape[1:])
    with torch.no_grad():
        assert torch.equal(captured(x), model(x))


class Shifted(nn.Module):
    """A batch norm whose weight is computed after the convolution."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 6, 3), fill(nn.BatchNorm2d(6))

    def forward(self, x):
        x, norm = self.conv(x), self.norm
        weight = norm.weight + 1
        return F.batch_norm(x, norm.running_mean, norm.running_var, weight, norm.bias)


def test_a_weight_computed_after_the_layer_is_a_reason():
    model, shape = Shifted().eval(), (1, 4, 9, 9)
    captured, (done,) = fold(model, shape)
    captured.graph.lint()
    assert "after the layer" in done.reason
    x = torch.randn(*shape)
    with torch.no_grad():
        assert torch.equal(captured(x), model(x))
