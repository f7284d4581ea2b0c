"""`prepare_fp8`: which layers are replaced, and what is copied."""

import copy

import pytest
import torch
from torch import nn

from ipex_inductor.errors import (
    ArgumentError,
    DeviceError,
    QuantizationError,
    WrappedModelError,
)
from ipex_inductor.quantization.fp8 import FP8Linear, fp8_autocast, prepare_fp8


class Named(nn.Linear):
    """A subclass that computes what nn.Linear does."""


class Scaled(nn.Linear):
    """A subclass with a forward of its own."""

    def forward(self, input):
        return super().forward(input) * 2


def test_model_and_optimizer_are_copied():
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    prepared, other = prepare_fp8(model, optimizer, "cpu")
    assert type(model[0]) is nn.Linear
    assert isinstance(prepared[0], FP8Linear)
    assert prepared[0].weight is not model[0].weight
    assert [id(p) for p in other.param_groups[0]["params"]] == [
        id(p) for p in prepared.parameters()
    ]
    with fp8_autocast(enabled=True):
        prepared(torch.ones(2, 4)).sum().backward()
    before = model[0].weight.clone()
    other.step()
    assert torch.equal(model[0].weight, before)
    assert not torch.equal(prepared[0].weight, before)
    assert not optimizer.state
    assert len(other.state) == 2


def test_in_place_the_parameters_stay_those_of_the_caller():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    weight, optimizer = model[0].weight, torch.optim.SGD(model.parameters(), 0.1)
    prepared, same = prepare_fp8(model, optimizer, inplace=True)
    assert (prepared is model, same is optimizer) == (True, True)
    assert model[0].weight is weight
    assert len(model) == 2  # containers get no child
    assert isinstance(model[0], FP8Linear)


def test_subclasses_count(monkeypatch):
    texts = []
    monkeypatch.setattr("ipex_inductor.quantization.fp8.preparing.warn_once", texts.append)
    model = prepare_fp8(nn.Sequential(Named(4, 4), nn.Sequential(Scaled(4, 4)), nn.Linear(4, 2)))
    assert isinstance(model[0], FP8Linear)
    assert isinstance(model[0], Named)
    assert isinstance(model[2], FP8Linear)
    assert type(model[1][0]) is Scaled
    assert texts == ["1.0 stays in floating point: Scaled has a forward of its own"]


def test_a_model_with_subclasses_is_saved_as_a_whole(tmp_path):
    model = prepare_fp8(nn.Sequential(Named(4, 4), nn.Linear(4, 2)))
    torch.save(model, tmp_path / "model.pt")
    for other in (torch.load(tmp_path / "model.pt", weights_only=False), copy.deepcopy(model)):
        assert type(other[0]) is type(model[0])
        assert other[1]._fp8[0] is other[0].fp8_scaling is not model[0].fp8_scaling
        with torch.no_grad(), fp8_autocast(enabled=True):
            assert torch.equal(other(torch.ones(2, 4)), model(torch.ones(2, 4)))


def test_parametrized_layers_compute_with_their_parametrization():
    model = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
    prepared, x = prepare_fp8(model), torch.randn(4, 8)
    assert torch.equal(prepared(x), model(x))
    with fp8_autocast(enabled=True):
        y = prepared(x)
    y.sum().backward()
    # Operands have three bits of mantissa: each term is off by at most 1/8 of its size.
    assert (y - model(x)).abs().max() < x.abs().max() * model.weight.abs().sum(1).max() / 8
    assert all(p.grad is not None for p in prepared.parameters())


def test_a_shared_layer_counts_once():
    layer = nn.Linear(4, 4)
    model = prepare_fp8(nn.Sequential(layer, layer))
    assert model[0] is model[1]
    assert model[0].fp8_scaling.gradient_state.shape[1] == 1


def test_a_constructed_layer_has_a_state_of_its_own():
    layer = FP8Linear(4, 2, bias=False, dtype=torch.bfloat16)
    with fp8_autocast(enabled=True):
        y = layer(torch.ones(3, 4, dtype=torch.bfloat16))
    assert y.dtype is torch.bfloat16
    assert layer.fp8_scaling.forward_state[-1, 0] == 1


def test_a_transposed_weight_computes_alike():
    layer = nn.Linear(3, 3)
    layer.weight = nn.Parameter(layer.weight.detach().t())
    prepared = prepare_fp8(layer)
    plain = nn.Linear(3, 3)
    plain.load_state_dict(layer.state_dict())
    plain = prepare_fp8(plain)
    plain.weight = nn.Parameter(layer.weight.detach().contiguous())
    x = torch.randn(2, 3)
    with fp8_autocast(enabled=True):
        assert torch.equal(prepared(x), plain(x))


def test_other_arguments_are_refused():
    with pytest.raises(ArgumentError, match="Module"):
        prepare_fp8(torch.relu)
    with pytest.raises(ArgumentError, match="Optimizer"):
        prepare_fp8(nn.Linear(2, 2), "sgd")
    with pytest.raises(ArgumentError, match="steps none"):
        prepare_fp8(nn.Linear(2, 2), torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1))
    with pytest.raises(DeviceError, match="xpu"):
        prepare_fp8(nn.Linear(2, 2), device="xpu")
    with pytest.raises(QuantizationError, match="linear layers; got none"):
        prepare_fp8(nn.Conv2d(2, 2, 1))
    with pytest.raises(QuantizationError, match="prepared before"):
        prepare_fp8(prepare_fp8(nn.Linear(2, 2)))
    with pytest.raises(QuantizationError, match="one device"):
        prepare_fp8(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")))
    with pytest.raises(WrappedModelError, match="OptimizedModule"):
        prepare_fp8(torch.compile(nn.Linear(2, 2)))


def encoder():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 2).eval()


def test_fused_encoder_layers_do_not_hide_linear_layers(monkeypatch):
    texts = []
    monkeypatch.setattr("ipex_inductor.quantization.fp8.preparing.warn_once", texts.append)
    model, plain = prepare_fp8(encoder()), encoder()
    assert plain.layers[0].activation_relu_or_gelu == 1
    with torch.no_grad(), fp8_autocast(calibrating=True):
        model(torch.ones(2, 3, 8))
    state = model.layers[0].self_attn.out_proj.fp8_scaling
    assert (state.forward_state[3:].amax(0) > 0).sum() == 8  # input and weight of four layers
    assert texts == [
        f"the projections of layers.{number}.self_attn stay in floating point:"
        " MultiheadAttention computes them without calling linear layers"
        for number in (0, 1)
    ]


def test_a_prepared_encoder_takes_padding():
    model = encoder()
    prepared, x = prepare_fp8(model), torch.randn(2, 3, 8)
    padding = torch.tensor([[False, False, False], [False, False, True]])
    with torch.no_grad():
        result, expected = (m(x, src_key_padding_mask=padding) for m in (prepared, model))
        with fp8_autocast(enabled=True):
            rounded = prepared(x, src_key_padding_mask=padding)
    torch.testing.assert_close(result[~padding], expected[~padding])
    torch.testing.assert_close(rounded[~padding], expected[~padding], atol=0.3, rtol=0)
    assert not torch.equal(rounded[~padding], result[~padding])


def test_lazy_layers_are_refused_until_they_know_their_sizes():
    model = nn.Sequential(nn.LazyLinear(4))
    with pytest.raises(QuantizationError, match="Run one batch"):
        prepare_fp8(model)
    model(torch.ones(2, 3))
    assert isinstance(prepare_fp8(model)[0], FP8Linear)
