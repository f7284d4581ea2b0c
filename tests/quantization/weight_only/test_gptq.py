"""GPTQ: smaller errors of outputs than rounding's, block by block, and checkpoints."""

import json
import logging

import pytest
import torch
from torch import nn

from ipex_inductor import quantization
from ipex_inductor.errors import QuantizationError
from ipex_inductor.quantization.weight_only import WeightOnlyLinear, report_weights
from ipex_inductor.quantization.weight_only.calibrating import find_blocks, gptq
from ipex_inductor.quantization.weight_only.gptq import GPTQSettings, round_by_gptq
from ipex_inductor.quantization.weight_only.rounding import round_to_nearest
from ipex_inductor.quantization.weight_only.storage import dequantize

pytestmark = pytest.mark.unit


def correlated(rows, columns):
    """Activations of a few directions and little noise, as those of networks."""
    torch.manual_seed(0)
    return torch.randn(rows, 16) @ torch.randn(16, columns) + 0.1 * torch.randn(rows, columns)


def output_error(weight, quantized, x):
    return float(((dequantize(quantized) - weight) @ x.t()).square().mean())


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize(
    ("name", "size", "symmetric"),
    [
        ("int4", 32, False),
        ("int4", 32, True),
        ("int4", -1, False),
        ("int4", 256, False),
        ("int8", -1, True),
        ("int8", 64, False),
        ("nf4", 32, True),
        ("fp8", 64, True),
    ],
)
def test_the_error_of_outputs_is_at_most_half_of_roundings(name, size, symmetric, act_order):
    x, fresh = correlated(2500, 168).split([2000, 500])
    weight = torch.randn(24, 168)
    settings = GPTQSettings(name, size, symmetric, 0.01, act_order)
    hessian = x.t() @ x
    quantized = round_by_gptq(weight, hessian, settings)
    quantized.check()
    rounded = round_to_nearest(weight, name, size, symmetric)
    assert output_error(weight, quantized, fresh) <= 0.5 * output_error(weight, rounded, fresh)
    has_groups = 0 < size < 168
    assert (quantized.order is not None) == (act_order and has_groups)
    assert torch.equal(hessian, x.t() @ x)


def test_columns_that_never_count_are_rounded_to_nearest():
    x = correlated(500, 64)
    x[:, 32:] = 0
    weight = torch.randn(8, 64)
    quantized = round_by_gptq(weight, x.t() @ x, GPTQSettings("int8", 32, True, search=False))
    rounded = round_to_nearest(weight, "int8", 32)
    assert torch.equal(quantized.weight[:, 32:], rounded.weight[:, 32:])


def test_activations_without_correlation_are_rounded_to_nearest():
    weight = torch.randn(8, 64)
    quantized = round_by_gptq(weight, torch.eye(64), GPTQSettings("int4", 32, search=False))
    rounded = round_to_nearest(weight, "int4", 32, symmetric=False)
    assert torch.equal(quantized.weight, rounded.weight)
    assert torch.equal(quantized.scales, rounded.scales)
    assert torch.equal(quantized.zeros, rounded.zeros)


@pytest.mark.parametrize(("name", "symmetric"), [("int4", True), ("int4", False), ("nf4", True)])
def test_a_searched_range_has_a_smaller_error(name, symmetric):
    torch.manual_seed(0)
    weight = torch.distributions.StudentT(3.0).sample((16, 128))  # with outliers
    errors = [
        float((dequantize(round_by_gptq(weight, torch.eye(128), settings)) - weight).square().sum())
        for settings in (GPTQSettings(name, 64, symmetric, search=s) for s in (True, False))
    ]
    assert errors[0] < 0.98 * errors[1]


def test_few_rows_are_damped_until_the_hessian_can_be_inverted():
    x = torch.randn(2, 200).double() @ torch.diag(torch.logspace(0, 6, 200).double())
    quantized = round_by_gptq(torch.randn(4, 200), (x.t() @ x).float(), GPTQSettings("int4", 64))
    assert torch.isfinite(dequantize(quantized)).all()


def test_hessians_that_are_not_finite_are_refused():
    with pytest.raises(QuantizationError, match="finite activations"):
        round_by_gptq(torch.randn(4, 8), torch.full((8, 8), float("nan")), GPTQSettings())


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.q, self.k = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.down = nn.Linear(width, width)
        self.spare = nn.Linear(width, width)  # an expert that no token goes to

    def forward(self, hidden, scale=None, mask=None):
        hidden = hidden + torch.sigmoid(self.q(hidden)) * self.k(hidden) * scale
        return (hidden + self.down(torch.relu(hidden)),)


class Decoder(nn.Module):
    def __init__(self, chain=True):
        super().__init__()
        torch.manual_seed(4)
        self.chain = chain
        self.embed = nn.Embedding(50, 64)
        self.layers = nn.ModuleList(Block(64) for _ in range(3))
        self.lm_head = nn.Linear(64, 50)

    def forward(self, tokens):
        hidden = self.embed(tokens)
        for block in self.layers:
            hidden = block(hidden, scale=torch.tensor(0.5))[0]
            hidden = hidden if self.chain else hidden * 1.0
        return self.lm_head(hidden)


def batches(count=24):
    torch.manual_seed(6)
    return [torch.randint(0, 50, (2, 16)) for _ in range(count)]


@pytest.mark.parametrize("chain", [True, False])
@pytest.mark.parametrize("act_order", [False, True])
def test_a_model_keeps_more_of_its_outputs_than_by_rounding(chain, act_order, caplog):
    model, data = Decoder(chain).train(), batches()
    with caplog.at_level(logging.INFO, "ipex_inductor"):
        result = gptq(model, data, group_size=32, act_order=act_order)
    assert ("blocks form no chain" in caplog.text) != chain
    assert model.training
    assert result.training
    assert isinstance(model.layers[0].q, nn.Linear)
    four = quantization.QConfigWoq(weight_dtype=2, group_size=32)
    skip = ["lm_head"] if chain else []
    rounded = quantization.quantize_weights(model, four, skip=skip)
    with torch.no_grad():
        exact = [model.eval()(x) for x in data]
        error, rounding_error = (
            sum(float((m.eval()(x) - y).square().mean()) for x, y in zip(data, exact, strict=True))
            for m in (result, rounded)
        )
    assert error <= 0.5 * rounding_error
    report = {layer.name: layer for layer in report_weights(result).layers}
    assert report["lm_head"].quantized != chain
    assert "no calibration data" in report["layers.1.spare"].note
    assert len(report) == 13


def test_each_block_is_calibrated_behind_quantized_ones():
    """The second block's activations are those that the quantized first block returns."""
    model = Decoder()
    seen = []
    model.layers[1].q.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    result = gptq(model, batches(2), group_size=-1)
    with torch.no_grad():
        first = result.layers[0](result.embed(batches(2)[0]), scale=torch.tensor(0.5))[0]
    assert any(torch.equal(x, first) for x in seen)


def test_settings_and_data_that_cannot_be_used_are_refused():
    with pytest.raises(QuantizationError, match="wbits 4 or 8"):
        gptq(Decoder(), batches(), wbits=3)
    with pytest.raises(QuantizationError, match="calibration data"):
        gptq(Decoder(), [])
    with pytest.raises(QuantizationError, match="a linear layer to quantize"):
        gptq(Decoder(), batches(1), skip=["layers"])


def test_inputs_are_tensors_tuples_or_mappings():
    x = batches(1)[0]
    weights = [
        gptq(Decoder(), [sample], group_size=32).layers[2].q.quantized_weight
        for sample in (x, (x,), {"tokens": x})
    ]
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[0], weights[2])


def test_two_lists_of_blocks_are_no_chain():
    model = nn.ModuleDict({"a": Decoder(), "b": Decoder()})
    assert find_blocks(model) == {}
    assert [*find_blocks(model["a"])] == ["layers.0", "layers.1", "layers.2"]


@pytest.mark.parametrize("act_order", [False, True])
def test_a_checkpoint_is_written_in_the_format_of_gptq(act_order, tmp_path):
    result = gptq(Decoder(), batches(4), group_size=32, act_order=act_order, save_dir=tmp_path)
    settings = json.loads((tmp_path / "quantize_config.json").read_text())
    assert (settings["bits"], settings["group_size"]) == (4, 32)
    assert (settings["checkpoint_format"], settings["desc_act"]) == ("gptq_v2", act_order)
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors")
    tensors = safetensors.load_file(tmp_path / "model.safetensors")
    layer = result.layers[1].down
    values = values_of_gptq(tensors, "layers.1.down")
    assert torch.equal(values, layer.dequantize())
    assert torch.equal(tensors["embed.weight"], result.embed.weight)
    assert torch.equal(tensors["layers.1.down.bias"], layer.bias)
    assert not any(name.endswith("_extra_state") for name in tensors)


def values_of_gptq(tensors, name):
    """The values of a layer, word by word."""
    qweight, qzeros = tensors[f"{name}.qweight"], tensors[f"{name}.qzeros"]
    scales, groups = tensors[f"{name}.scales"], tensors[f"{name}.g_idx"]
    rows, columns = scales.shape[1], len(groups)
    values = torch.empty(rows, columns)
    for n in range(rows):
        for k in range(columns):
            stored = (int(qweight[k // 8, n]) >> (4 * (k % 8))) & 15
            zero = (int(qzeros[groups[k], n // 8]) >> (4 * (n % 8))) & 15
            values[n, k] = (stored - zero) * scales[groups[k], n].float()
    return values


def test_sizes_that_fill_no_words_are_refused_before_anything_is_quantized(tmp_path):
    model = Decoder()
    model.layers[2].spare = nn.Linear(64, 63)
    with pytest.raises(QuantizationError, match=r"layers\.2\.spare"):
        gptq(model, batches(1), group_size=32, inplace=True, save_dir=tmp_path)
    assert isinstance(model.layers[0].q, nn.Linear)
    assert not [*tmp_path.iterdir()]


def test_tied_weights_are_written_once(tmp_path):
    model = Decoder()
    model.lm_head.weight = model.embed.weight
    result = quantization.quantize_weights(
        model, quantization.QConfigWoq(weight_dtype=1), skip=["lm_head"]
    )
    quantization.save_gptq(result, tmp_path)
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors")
    tensors = safetensors.load_file(tmp_path / "model.safetensors")
    assert "embed.weight" in tensors
    assert "lm_head.weight" not in tensors


def test_types_that_the_format_has_not_are_refused(tmp_path):
    result = quantization.quantize_weights(Decoder(), quantization.QConfigWoq(weight_dtype=3))
    with pytest.raises(QuantizationError, match="int4 or int8"):
        quantization.save_gptq(result, tmp_path)
    with pytest.raises(QuantizationError, match="INT4 or INT8"):
        gptq(Decoder(), batches(1), weight_dtype=4, save_dir=tmp_path)
    assert isinstance(result.lm_head, WeightOnlyLinear)


def test_a_zero_point_of_16_is_not_cut_to_4_bits(tmp_path):
    """Version 1 of the format stores zero points less 1, so its largest is 16."""
    model = nn.Sequential(nn.Linear(32, 16))
    result = quantization.quantize_weights(
        model, quantization.QConfigWoq(weight_dtype=2, weight_qscheme=1)
    )
    result[0].zeros[3, 0] = 16
    with pytest.raises(QuantizationError, match="zero points of 0 that fit in 4 bits"):
        quantization.save_gptq(result, tmp_path / "new")
    assert not (tmp_path / "new").exists()
