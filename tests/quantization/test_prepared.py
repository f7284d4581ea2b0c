"""Prepared models: outputs of the model, scales, and errors before anything is converted."""

import copy
import math

import pytest
import torch
from torch import nn

from ipex_inductor import quantization
from ipex_inductor.errors import QuantizationError
from ipex_inductor.quantization.converted import convert_prepared
from ipex_inductor.quantization.prepared import prepare_graph
from ipex_inductor.quantization.scheme import Scheme, SchemeMapping, TensorScale
from ipex_inductor.quantization.tuning import autotune
from support.int8_models import (
    DEFAULT,
    DepthwiseNet,
    ResNet,
    calibrate,
    signal_to_noise,
    trained_like,
)

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
    assert prepared.tensor_scales()["input:0"].scale == pytest.approx(0.02)


def test_scales_can_be_set():
    model = trained_like(DepthwiseNet(), 3, 16, 16)
    image = torch.randn(2, 3, 16, 16)
    first = calibrate(model, (image,))
    second = prepare_graph(model, DEFAULT, (image,))
    second.set_tensor_scales(first.tensor_scales())
    assert second.tensor_scales() == first.tensor_scales()
    assert torch.equal(convert_prepared(first)(image), convert_prepared(second)(image))


def test_scales_of_unknown_tensors_are_an_error():
    prepared = prepare_graph(nn.Linear(4, 4), DEFAULT, (torch.randn(1, 4),))
    with pytest.raises(QuantizationError, match="other:conv2d:0"):
        prepared.set_tensor_scales({"other:conv2d:0": TensorScale(1.0, 0, False)})


def test_summaries_carry_all_scales(tmp_path):
    model = trained_like(ResNet(), 3, 32, 32)
    first = calibrate(model, (IMAGE,))
    first.save_qconf_summary(qconf_summary=tmp_path / "scales.json")
    second = prepare_graph(model, DEFAULT, (IMAGE,))
    second.load_qconf_summary(qconf_summary=tmp_path / "scales.json")
    assert second.tensor_scales() == first.tensor_scales()


def test_observers_do_not_grow():
    prepared = calibrate(ResNet().eval(), (IMAGE,))
    sizes = [observer.counts.numel() for observer in prepared.tensor_observers.values()]
    with torch.no_grad():
        prepared(torch.randn(9, 3, 64, 64) * 100)
    assert [observer.counts.numel() for observer in prepared.tensor_observers.values()] == sizes


@pytest.mark.parametrize(
    "mapping",
    [
        quantization.default_static_qconfig_mapping,
        quantization.get_smooth_quant_qconfig_mapping(alpha=0.5),
    ],
    ids=["plain", "smooth"],
)
def test_new_data_counts_after_a_summary_was_loaded(mapping, tmp_path):
    model, x = nn.Linear(4, 4).eval(), torch.randn(8, 4)
    other, third = (quantization.prepare(model, mapping, x) for _ in range(2))
    other(x)
    other.save_qconf_summary(tmp_path / "small.json")
    third(10 * x)
    third.save_qconf_summary(tmp_path / "large.json")
    third.load_qconf_summary(tmp_path / "small.json")
    assert third.tensor_scales() == other.tensor_scales()
    assert torch.equal(quantization.convert(third)(x), quantization.convert(other)(x))
    third(10 * x)
    third.save_qconf_summary(tmp_path / "again.json")
    large, again = ((tmp_path / f"{name}.json").read_text() for name in ("large", "again"))
    assert again == large


def test_a_copy_keeps_what_is_needed_to_save(tmp_path):
    model = nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3)).eval()
    mapping, x = quantization.default_static_qconfig_mapping, torch.randn(2, 2, 4, 4)
    prepared = quantization.prepare(model, mapping, x, bn_folding=False)
    prepared(x)
    quantized = quantization.convert(copy.deepcopy(prepared))
    quantized.save(tmp_path / "net.pt")
    assert torch.equal(torch.jit.load(tmp_path / "net.pt")(x), quantized(x))
    assert quantized._ipex_recipe == quantization.convert(prepared)._ipex_recipe


def test_a_copy_observes_alone():
    prepared = calibrate(nn.Linear(4, 4), (torch.ones(1, 4),))
    before = prepared.tensor_scales()
    other = copy.deepcopy(prepared)
    with torch.no_grad():
        other(torch.full((1, 4), 100.0))
    assert prepared.tensor_scales() == before
    assert other.tensor_scales() != before
    assert convert_prepared(other)(torch.ones(2, 4)).shape == (2, 4)


class Named(nn.Module):
    """A model whose layers are in a module of any name."""

    def __init__(self, name):
        super().__init__()
        self.name = name
        self.add_module(name, nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)))

    def forward(self, x):
        return getattr(self, self.name)(x)


FREE = [
    *("layers", "plan", "observers", "recipe", "example_inputs", "scales", "means", "_means"),
    *("_set_scales", "_tensor_scales", "autocast_dtype", "_observer_0", "_scale_0"),
    *("_zero_point_0", "smoothing", "bn_folding", "KEPT", "_scale", "set_scales"),
]


@pytest.mark.parametrize("name", FREE)
def test_models_may_have_these_names(name):
    model, x = Named(name).eval(), torch.randn(3, 4)
    quantized = convert_prepared(copy.deepcopy(calibrate(model, (x,))))
    assert quantized.state_dict().keys() == model.state_dict().keys()
    with torch.no_grad():
        assert signal_to_noise(model(x), copy.deepcopy(quantized)(x)) > 20


@pytest.mark.parametrize("name", ["layer_decisions", "tensor_scales", "save", "graph", "meta"])
def test_reserved_names_are_refused(name):
    model = nn.Linear(4, 4)
    model.register_module(name, nn.Linear(4, 4))
    with pytest.raises(QuantizationError, match=name):
        prepare_graph(model, DEFAULT, (torch.randn(1, 4),))


def test_tuned_models_have_names_of_their_own():
    with pytest.raises(QuantizationError, match="trials"):
        autotune(Named("trials").eval(), [torch.randn(2, 4)])
