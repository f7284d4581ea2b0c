"""Bias correction: mean outputs as of exact weights, by the weights of the time."""

import copy

import pytest
import torch
from torch import nn

from ipex_inductor.quantization.converted import convert_prepared
from ipex_inductor.quantization.prepared import prepare_graph
from support.int8_models import CORRECTED, calibrate, quantize


def mean_error(model, quantized, x):
    """Return the largest error of a channel's mean output."""
    with torch.no_grad():
        error = quantized(x) - model(x)
    return error.transpose(0, 1 if error.dim() > 2 else -1).flatten(1).mean(1).abs().max()


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(24, 8), (999, 24)),
        (nn.Linear(24, 8, bias=False), (99, 9, 24)),
        (nn.Conv2d(8, 6, 3), (16, 8, 12, 12)),
        (nn.Conv2d(8, 16, 3, groups=4, bias=False), (16, 8, 12, 12)),
        (nn.Conv2d(8, 8, 3, groups=8), (16, 8, 12, 12)),
        (nn.Conv1d(8, 6, 3), (16, 8, 40)),
    ],
    ids=["linear", "rows", "conv2d", "groups", "depthwise", "conv1d"],
)
def test_means_are_those_of_exact_weights(layer, shape):
    torch.manual_seed(0)
    layer.reset_parameters()  # parametrized layers are made in whatever order tests are collected
    torch.manual_seed(0)
    x = torch.rand(*shape)  # of mean 1/2, as activations after a ReLU are never around zero
    plain, corrected = quantize(layer, (x,)), quantize(layer, (x,), mapping=CORRECTED)
    # Rounded inputs have an error too: 0.05 to 0.4 of it was left for twelve seeds.
    assert mean_error(layer, corrected, x) < 0.5 * mean_error(layer, plain, x)


def test_weights_that_change_are_corrected_anew():
    model, x = nn.Linear(24, 8), torch.rand(64, 24)
    corrected, plain = quantize(model, (x,), mapping=CORRECTED), quantize(model, (x,))
    with torch.no_grad():
        model.weight.copy_(torch.randn(8, 24))
    assert mean_error(model, corrected, x) < 0.3 * mean_error(model, plain, x)


def test_means_accumulate_over_batches_and_in_copies():
    model, x = nn.Linear(4, 4), torch.randn(6, 4)
    prepared = calibrate(model, (x[:2],), (x[2:],), mapping=CORRECTED)
    (mean,) = copy.deepcopy(prepared)._ipex_means().values()
    torch.testing.assert_close(mean, x.mean(0))


def test_inputs_of_one_dimension():
    model, x = nn.Linear(4, 4), torch.randn(4)
    prepared = calibrate(model, (x,), mapping=CORRECTED)
    assert convert_prepared(prepared)(x).shape == (4,)
    (mean,) = prepared._ipex_means().values()
    torch.testing.assert_close(mean, x)


def test_state_dicts_have_no_means():
    quantized = quantize(nn.Linear(4, 4), (torch.randn(6, 4),), mapping=CORRECTED)
    assert quantized.state_dict().keys() == {"weight", "bias"}


def test_low_precision():
    x = torch.randn(6, 4).bfloat16()
    quantized = quantize(nn.Linear(4, 4).bfloat16(), (x,), mapping=CORRECTED)
    assert quantized(x).dtype is torch.bfloat16


def test_scales_alone_leave_biases_as_they_are():
    model, x = nn.Linear(4, 4), torch.randn(6, 4)
    prepared = prepare_graph(model, CORRECTED, (x,))
    prepared.set_tensor_scales(calibrate(model, (x,)).tensor_scales())
    assert torch.equal(convert_prepared(prepared)(x), quantize(model, (x,))(x))
