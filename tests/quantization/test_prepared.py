"""Prepared models: outputs of the model, scales, and errors before anything is converted."""

import copy
import math

import pytest
import torch
from torch import nn

from ipex_inductor.errors import QuantizationError
from ipex_inductor.quantization.converted import convert_prepared
from ipex_inductor.quantization.prepared import prepare_graph
from ipex_inductor.quantization.scheme import Scheme, SchemeMapping, TensorScale
from support.int8_models import DEFAULT, DepthwiseNet, ResNet, calibrate, trained_like

IMAGE = torch.randn(2, 3, 32, 32)


def test_outputs_are_the_models():
    model = trained_like(ResNet(), 3, 32, 32)
    prepared = prepare_graph(model, DEFAULT, (IMAGE,))
    x = torch.randn(5, 3, 32, 32)
    with torch.no_grad():  # batch norms are folded, so each weight is rounded once more
        torch.testing.assert_close(prepared(x), model(x), rtol=1e-4, atol=1e-4)
        exact = prepare_graph(model, DEFAULT, (IMAGE,), bn_folding=False)
        assert torch.equal(exact(x), model(x))


def test_parameters_are_shared_and_the_state_dict_is_the_models():
    model = ResNet().eval()
    prepared = calibrate(model, (IMAGE,))
    expected = model.state_dict(keep_vars=True)
    for module in (prepared, convert_prepared(prepared)):
        state = module.state_dict(keep_vars=True)
        assert state.keys() == expected.keys()
        assert all(state[name] is expected[name] for name in state)


def test_converting_an_uncalibrated_model_is_an_error():
    prepared = prepare_graph(ResNet(), DEFAULT, (IMAGE,))
    with pytest.raises(QuantizationError, match=r"calibrat.*input:0"):
        convert_prepared(prepared)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bad_values_name_their_layer(bad):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    prepared = prepare_graph(model, DEFAULT, (torch.randn(1, 4),))
    with pytest.raises(QuantizationError, match="input:0"):
        prepared(torch.full((1, 4), bad))
    nn.init.constant_(model[0].bias, bad)
    with pytest.raises(QuantizationError, match="1:relu:0"):
        prepared(torch.randn(1, 4))


def test_batches_accumulate():
    model = nn.Linear(4, 4)
    mapping = SchemeMapping(Scheme(observer="min_max"))
    prepared = calibrate(model, (torch.ones(1, 4),), (torch.full((3, 4), 5.1),), mapping=mapping)
    assert prepared.scales()["input:0"].scale == pytest.approx(0.02)


def test_scales_can_be_set():
    model = trained_like(DepthwiseNet(), 3, 16, 16)
    image = torch.randn(2, 3, 16, 16)
    first = calibrate(model, (image,))
    second = prepare_graph(model, DEFAULT, (image,))
    second.set_scales(first.scales())
    assert second.scales() == first.scales()
    assert torch.equal(convert_prepared(first)(image), convert_prepared(second)(image))


def test_scales_of_unknown_tensors_are_an_error():
    prepared = prepare_graph(nn.Linear(4, 4), DEFAULT, (torch.randn(1, 4),))
    with pytest.raises(QuantizationError, match="other:conv2d:0"):
        prepared.set_scales({"other:conv2d:0": TensorScale(1.0, 0, False)})


def test_summaries_carry_all_scales(tmp_path):
    model = trained_like(ResNet(), 3, 32, 32)
    first = calibrate(model, (IMAGE,))
    first.save_qconf_summary(qconf_summary=tmp_path / "scales.json")
    second = prepare_graph(model, DEFAULT, (IMAGE,))
    second.load_qconf_summary(qconf_summary=tmp_path / "scales.json")
    assert second.scales() == first.scales()


def test_observers_do_not_grow():
    prepared = calibrate(ResNet().eval(), (IMAGE,))
    sizes = [observer.counts.numel() for observer in prepared.observers.values()]
    with torch.no_grad():
        prepared(torch.randn(9, 3, 64, 64) * 100)
    assert [observer.counts.numel() for observer in prepared.observers.values()] == sizes


def test_a_copy_observes_alone():
    prepared = calibrate(nn.Linear(4, 4), (torch.ones(1, 4),))
    before = prepared.scales()
    other = copy.deepcopy(prepared)
    with torch.no_grad():
        other(torch.full((1, 4), 100.0))
    assert prepared.scales() == before
    assert other.scales() != before
    assert convert_prepared(other)(torch.ones(2, 4)).shape == (2, 4)
