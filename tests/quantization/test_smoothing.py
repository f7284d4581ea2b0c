"""SmoothQuant: exact before rounding, better where channels differ, shared where inputs are."""

import copy

import pytest
import torch
from torch import nn

from ipex_inductor import quantization
from ipex_inductor.errors import QuantizationError, SummaryFileError
from ipex_inductor.quantization import smoothing


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.out = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        return self.out(self.query(x).relu() + self.key(x).tanh())


def data(count=4):
    spread = torch.ones(16)
    spread[3] = 200.0
    return [torch.randn(8, 16) * spread for _ in range(count)]


def quantize(net, mapping, inputs):
    prepared = quantization.prepare(net, mapping, inputs[0])
    for x in inputs:
        torch.testing.assert_close(prepared(x), net(x))
    return prepared, quantization.convert(prepared)


def error(net, quantized, x):
    return ((net(x) - quantized(x)).norm() / net(x).norm()).item()


@torch.no_grad()
def test_it_is_better_where_one_channel_is_large():
    net, inputs = Net().eval(), data()
    plain = quantize(net, quantization.default_static_qconfig_mapping, inputs)[1]
    mapping = quantization.get_smooth_quant_qconfig_mapping(alpha=0.5)
    smooth = quantize(net, mapping, inputs)[1]
    assert error(net, smooth, inputs[0]) < 0.5 * error(net, plain, inputs[0])
    assert {*smooth.state_dict()} == {*net.state_dict()}


@torch.no_grad()
def test_factors_are_those_of_the_formula_and_shared():
    net, inputs = Net().eval(), data()
    mapping = quantization.get_smooth_quant_qconfig_mapping(alpha=0.3)
    prepared, quantized = quantize(net, mapping, inputs)
    _, tensors = smoothing.smoothing_of(prepared)
    assert [len(tensor.weights) for tensor in tensors] == [2, 1]
    weights = torch.cat([net.query.weight, net.key.weight]).abs().amax(0)
    expected = torch.cat(inputs).abs().amax(0) ** 0.3 / weights**0.7
    torch.testing.assert_close(quantized._ipex_smooth_0, expected)
    torch.testing.assert_close(quantized._ipex_unsmooth_0, 1 / expected)


@torch.no_grad()
def test_a_copy_keeps_its_factors_and_observes_alone():
    net, inputs = Net().eval(), data()
    mapping = quantization.get_smooth_quant_qconfig_mapping(alpha=0.3)
    prepared, quantized = quantize(net, mapping, inputs)
    other = copy.deepcopy(prepared)
    assert torch.equal(quantization.convert(other)(inputs[0]), quantized(inputs[0]))
    other(100 * inputs[0])
    larger = quantization.convert(other)
    assert (larger._ipex_smooth_0 > 2 * quantized._ipex_smooth_0).all()
    assert torch.equal(quantization.convert(prepared)(inputs[0]), quantized(inputs[0]))


def test_without_sharing_each_layer_has_its_factors():
    mapping = quantization.get_smooth_quant_qconfig_mapping(share_weight_observers=False)
    prepared = quantization.prepare(Net().eval(), mapping, data()[0])
    assert [len(tensor.weights) for tensor in smoothing.smoothing_of(prepared)[1]] == [1, 1, 1]


@torch.no_grad()
def test_channels_of_zeros_give_finite_values():
    net, inputs = Net().eval(), data()
    for x in inputs:
        x[:, 5] = 0
    net.query.weight[:, 7] = net.key.weight[:, 7] = 0
    mapping = quantization.get_smooth_quant_qconfig_mapping()
    quantized = quantize(net, mapping, inputs)[1]
    assert quantized(inputs[0]).isfinite().all()


@torch.no_grad()
def test_a_summary_has_the_factors(tmp_path):
    net, inputs = Net().eval(), data()
    mapping = quantization.get_smooth_quant_qconfig_mapping()
    prepared, quantized = quantize(net, mapping, inputs)
    file = tmp_path / "smooth.json"
    prepared.save_qconf_summary(qconf_summary=file)
    again = quantization.prepare(net, mapping, inputs[0])
    again.load_qconf_summary(qconf_summary=file)
    assert torch.equal(quantization.convert(again)(inputs[1]), quantized(inputs[1]))
    plain = quantization.prepare(net, quantization.default_static_qconfig_mapping, inputs[0])
    with pytest.raises(SummaryFileError):
        plain.load_qconf_summary(qconf_summary=file)


def test_an_uncalibrated_model_is_refused():
    mapping = quantization.get_smooth_quant_qconfig_mapping()
    with pytest.raises(QuantizationError, match="a calibrated model"):
        quantization.convert(quantization.prepare(Net().eval(), mapping, data()[0]))


@pytest.mark.parametrize("alpha", [-0.1, 1.5, "auto"])
def test_an_alpha_that_is_none_is_refused(alpha):
    with pytest.raises(QuantizationError, match="an alpha between 0 and 1"):
        quantization.get_smooth_quant_qconfig_mapping(alpha=alpha)


def test_observers_of_torch_are_read():
    from torch.ao.quantization import HistogramObserver, MinMaxObserver, PerChannelMinMaxObserver

    maker = MinMaxObserver.with_args(dtype=torch.qint8, qscheme=torch.per_tensor_symmetric)
    mapping = quantization.get_smooth_quant_qconfig_mapping(
        act_observer=maker, act_ic_observer=PerChannelMinMaxObserver.with_args(ch_axis=-1)
    )
    assert mapping.global_qconfig == quantization.Scheme(symmetric=True, observer="min_max")
    with pytest.raises(QuantizationError, match="input channels"):
        quantization.get_smooth_quant_qconfig_mapping(act_ic_observer=HistogramObserver)


def test_corrected_biases_are_refused():
    mapping = quantization.get_smooth_quant_qconfig_mapping()
    mapping.set_global(quantization.Scheme(bias_correction=True))
    with pytest.raises(QuantizationError, match="without bias correction"):
        quantization.prepare(Net().eval(), mapping, data()[0])
