"""Whole models: which layers are replaced, memory, ties, Conv1D, refusals, prepare and convert."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from ipex_inductor import quantization
from ipex_inductor.errors import ArgumentError, QuantizationError
from ipex_inductor.quantization.weight_only import (
    QConfigWoq,
    WeightOnlyLinear,
    quantize_weights,
    report_weights,
)

pytestmark = pytest.mark.unit

INT4 = QConfigWoq(weight_dtype=2, group_size=32)


class Own(nn.Linear):
    def forward(self, x):
        return super().forward(x) + 1


class Tied(nn.Module):
    """A language model whose head shares the weight of its embedding."""

    _tied_weights_keys = {"lm_head.weight": "embed.weight"}  # noqa: RUF012

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(40, 64)
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 64, bias=False)
        self.lm_head = nn.Linear(64, 40, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.lm_head(x + self.down(torch.relu(self.up(x))))


def reference(model, tokens):
    """The outputs of a twin in floating point with the quantized layers' dequantized weights."""
    twin = Tied().eval()
    twin.lm_head.weight = nn.Parameter(torch.empty(40, 64))
    with torch.no_grad():
        twin.embed.weight.copy_(model.embed.weight)
        for name in ("up", "down", "lm_head"):
            getattr(twin, name).weight.copy_(getattr(model, name).dequantize())
        twin.up.bias.copy_(model.up.bias)
        return twin(tokens)


@pytest.mark.parametrize("inplace", [False, True])
def test_all_linear_layers_are_replaced_and_the_embedding_stays(inplace):
    model = Tied().eval()
    before = copy.deepcopy(model.state_dict())
    tokens = torch.randint(0, 40, (2, 5))
    result = quantize_weights(model, INT4, inplace)
    assert (result is model) == inplace
    layers = [result.up, result.down, result.lm_head]
    assert all(isinstance(layer, WeightOnlyLinear) for layer in layers)
    assert torch.equal(result.embed.weight, before["embed.weight"])
    with torch.no_grad():
        torch.testing.assert_close(result(tokens), reference(result, tokens), rtol=1e-5, atol=1e-5)
    if not inplace:
        assert result.embed.weight is model.embed.weight
        assert model.lm_head.weight is model.embed.weight
        assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_a_tied_head_is_reported_and_no_longer_tied():
    result = quantize_weights(Tied().eval(), INT4)
    head = report_weights(result).layers[-1]
    assert head.name == "lm_head"
    assert head.note == "embed keeps the tied weight in floating point"
    assert (head.float_bytes, head.stored_bytes) == (40 * 64 * 4, 40 * 32 + 40 * 2 * (2 + 1))
    assert result._tied_weights_keys == {}
    assert Tied._tied_weights_keys
    assert "lm_head" in str(report_weights(result))


def test_no_float_weight_of_a_layer_outlives_it():
    model = Tied().eval()
    up, head = weakref.ref(model.up.weight), weakref.ref(model.lm_head)
    quantize_weights(model, INT4, inplace=True)
    gc.collect()
    assert up() is None
    assert head() is None


def test_weights_are_released_layer_by_layer(monkeypatch):
    """When a layer is rounded, the float weights of all layers before it are gone."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    weights = [weakref.ref(layer.weight) for layer in model]
    alive = []
    round_layer = WeightOnlyLinear.from_linear.__func__

    def count(cls, linear, qconfig):
        alive.append(sum(weight() is not None for weight in weights))
        return round_layer(cls, linear, qconfig)

    monkeypatch.setattr(WeightOnlyLinear, "from_linear", classmethod(count))
    quantize_weights(model, INT4, inplace=True)
    assert alive == [6, 5, 4, 3, 2, 1]


def test_layers_that_share_a_weight_share_its_quantized_form():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    model[1].weight = model[0].weight
    result = quantize_weights(model, INT4)
    assert result[0].quantized_weight is result[1].quantized_weight
    assert not torch.equal(result[0].bias, result[1].bias)
    assert [layer.note for layer in report_weights(result).layers] == ["", ""]


def test_layers_that_stay_have_reasons():
    model = nn.ModuleDict(
        {
            "plain": nn.Linear(32, 8),
            "own": Own(32, 8),
            "parametrized": parametrizations.weight_norm(nn.Linear(32, 8)),
            "attention": nn.MultiheadAttention(32, 2),
            "body": nn.Sequential(nn.Linear(32, 8)),
            "lazy": nn.LazyLinear(8),
            "none": nn.Linear(32, 8),
        }
    )
    mapping = quantization.get_weight_only_quant_qconfig_mapping()
    mapping.set_module_name("none", None)
    result = quantize_weights(model, mapping, skip=["body"])
    report = report_weights(result)
    assert [layer.name for layer in report.quantized] == ["plain"]
    reasons = {layer.name: layer.reason for layer in report.skipped}
    for name, text in {
        "own": "forward of its own",
        "parametrized": "parametrizations",
        "attention.out_proj": "without calling it",
        "body.0": "list of skipped layers",
        "lazy": "forward of its own|no parameter",
        "none": "the mapping",
    }.items():
        assert any(part in reasons[name] for part in text.split("|")), (name, reasons[name])


def test_encoders_of_torch_call_their_layers():
    model = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True).eval()
    result = quantize_weights(model, QConfigWoq())
    x = torch.randn(2, 4, 32)
    with torch.no_grad():
        # int8 weights: relative errors of 2^-8 in a layer norm's output of the order of one
        torch.testing.assert_close(result(x), model(x), rtol=0.05, atol=0.05)
    assert isinstance(result.linear1, WeightOnlyLinear)


def test_conv1d_of_transformers_is_a_linear_layer():
    conv1d = pytest.importorskip("transformers.pytorch_utils", reason="transformers").Conv1D
    model = nn.Sequential(conv1d(24, 40))
    model[0].bias.data.normal_()
    result = quantize_weights(model, QConfigWoq(weight_dtype=1, group_size=32))
    assert (result[0].in_features, result[0].out_features) == (40, 24)
    x = torch.randn(3, 40)
    with torch.no_grad():
        # half a step of 1/127 of weights around 0.02, over 40 products
        torch.testing.assert_close(result(x), model(x), rtol=0, atol=0.01)


def test_hooks_go_along():
    model = nn.Sequential(nn.Linear(32, 8))
    model[0].register_forward_hook(lambda module, args, output: output + 100)
    assert quantize_weights(model, INT4)(torch.zeros(1, 32)).min() > 90


def test_a_model_in_training_mode_stays_in_it():
    result = quantize_weights(nn.Sequential(nn.Linear(32, 8)).train(), INT4)
    assert result[0].training


@pytest.mark.parametrize("inplace", [False, True])
def test_nothing_is_changed_if_a_weight_is_not_finite(inplace):
    model = nn.Sequential(nn.Linear(32, 8), nn.Linear(8, 8))
    model[1].weight.data[0, 0] = float("nan")
    with pytest.raises(QuantizationError, match=r"finite weights of 1.*skip=\['1'\]"):
        quantize_weights(model, INT4, inplace)
    assert all(type(layer) is nn.Linear for layer in model)


def test_bad_arguments_are_refused():
    with pytest.raises(ArgumentError, match="Module"):
        quantize_weights(torch.zeros(2), INT4)
    with pytest.raises(ArgumentError, match="from_linear"):
        quantize_weights(nn.Linear(2, 2), INT4)
    with pytest.raises(QuantizationError, match="a linear layer to quantize"):
        quantize_weights(nn.Sequential(nn.ReLU()), INT4)
    with pytest.raises(QuantizationError, match="head"):
        quantize_weights(nn.Sequential(nn.Linear(2, 2)), INT4, skip=["head"])
    with pytest.raises(QuantizationError, match="quantize_weights"):
        report_weights(nn.ReLU())


@pytest.mark.parametrize("inplace", [False, True])
def test_prepare_and_convert_take_a_mapping_as_ipex_did(inplace):
    model = Tied().eval()
    mapping = quantization.get_weight_only_quant_qconfig_mapping(weight_dtype=2, group_size=32)
    prepared = quantization.prepare(model, mapping, inplace=inplace)
    tokens = torch.randint(0, 40, (2, 5))
    assert torch.equal(prepared(tokens), model(tokens))
    converted = quantization.convert(prepared, inplace=inplace)
    assert (converted is model) == inplace
    with torch.no_grad():
        expected = reference(converted, tokens)
        torch.testing.assert_close(converted(tokens), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(QuantizationError, match="prepare"):
        quantization.convert(converted)


def test_a_quantized_model_goes_through_a_state_dict():
    model = Tied().eval()
    result = quantize_weights(model, INT4)
    torch.manual_seed(9)
    other = quantize_weights(Tied().eval(), INT4)
    other.load_state_dict(result.state_dict())
    tokens = torch.randint(0, 40, (1, 4))
    assert torch.equal(other(tokens), result(tokens))


def test_a_compiled_model_computes_the_same():
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 40, bias=False)).eval()
    result = quantize_weights(model, INT4)
    compiled = torch.compile(result, backend="ipex", fullgraph=True, options={"strict": True})
    x = torch.randn(3, 64)
    with torch.no_grad():
        # fp32 sums of 96 products in another order
        torch.testing.assert_close(compiled(x), result(x), rtol=1e-5, atol=1e-5)
