"""Gradients of converted graphs: rounding passes them, ranges cut them off."""

import pytest
import torch
from torch import nn

from ipex_inductor.errors import QuantizationError
from ipex_inductor.quantization import prepare_qat
from ipex_inductor.quantization.training import straight_through
from support.int8_models import CORRECTED, ResNet, quantize, trained_like


def test_outputs_are_those_of_the_converted_model():
    model, x = trained_like(ResNet(), 3, 32, 32), torch.randn(4, 3, 32, 32)
    quantized = quantize(model, (x,), mapping=CORRECTED)
    assert torch.equal(prepare_qat(quantized)(x), quantized(x))


def test_gradients_pass_inside_the_range_alone():
    x = torch.tensor([-0.3, 0.26, 0.5, 2.0], requires_grad=True)
    rounded = torch.tensor([0.0, 0.25, 0.5, 1.0])
    value = straight_through(x, rounded, torch.tensor(0.25), torch.tensor(0), 0, 4)
    value.sum().backward()
    assert torch.equal(value, rounded)
    assert x.grad.tolist() == [0, 1, 1, 0]


def test_each_parameter_gets_a_gradient_near_that_of_the_network():
    model, x = trained_like(ResNet(), 3, 32, 32), torch.randn(8, 3, 32, 32)
    qat = prepare_qat(quantize(model, (x,)))
    exact = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    other = torch.autograd.grad(qat(x).square().sum(), list(model.parameters()))
    for want, got in zip(exact, other, strict=True):
        assert torch.cosine_similarity(want.flatten(), got.flatten(), 0) > 0.9


def test_training_changes_the_converted_model():
    model, x, y = nn.Linear(8, 2), torch.randn(64, 8), torch.randn(64, 2)
    quantized = quantize(model, (x,))
    qat = prepare_qat(quantized)
    optimizer = torch.optim.SGD(qat.parameters(), 0.1)
    before = (quantized(x) - y).square().mean().item()
    for _ in range(20):
        optimizer.zero_grad()
        (qat(x) - y).square().mean().backward()
        optimizer.step()
    assert (quantized(x) - y).square().mean().item() < before
    assert torch.equal(quantized.weight, model.weight)


def test_models_that_were_not_converted_are_refused():
    with pytest.raises(QuantizationError, match="statically quantized"):
        prepare_qat(nn.Linear(2, 2))
