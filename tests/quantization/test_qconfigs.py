"""Settings: every kind of a QConfigMapping counts, and what no kernel has is refused."""

import pytest
import torch
from torch import nn
from torch.ao import quantization as ao
from torch.nn import functional

from ipex_inductor import quantization
from ipex_inductor.errors import QuantizationError
from ipex_inductor.quantization import Scheme
from ipex_inductor.quantization.qconfigs import is_dynamic, read_mapping, read_qconfig
from ipex_inductor.quantization.scheme import Layer

WEIGHT = ao.PerChannelMinMaxObserver.with_args(
    dtype=torch.qint8, qscheme=torch.per_channel_symmetric
)


def qconfig(activation, weight=WEIGHT):
    return ao.QConfig(activation=activation, weight=weight)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 1))
        self.head = nn.Linear(8, 4)
        self.table = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        y = self.head(self.body(x).mean((2, 3)))
        return functional.linear(y, self.table).matmul(self.table)


def quantized_layers(mapping):
    prepared = quantization.prepare(Net().eval(), mapping, torch.randn(1, 3, 4, 4))
    return {layer.name for layer in prepared.layer_decisions if layer.quantized}


ALL = {
    *("body.0:conv2d:0", "body.2:conv2d:0", "head:linear:0", ":linear:0"),
    *(":matmul:0",),
}
SET = {
    "module": (("set_module_name", "head"), {"head:linear:0"}),
    "module around": (("set_module_name", "body"), {"body.0:conv2d:0", "body.2:conv2d:0"}),
    "regex": (("set_module_name_regex", r"body\.[2-9]"), {"body.2:conv2d:0"}),
    "class": (("set_object_type", nn.Linear), {"head:linear:0"}),
    "function": (("set_object_type", functional.linear), {"head:linear:0", ":linear:0"}),
    "builtin": (("set_object_type", torch.matmul), {":matmul:0"}),
    "name": (("set_object_type", "conv2d"), {"body.0:conv2d:0", "body.2:conv2d:0"}),
    "order": (("set_module_name_object_type_order", "", functional.linear, 0), {":linear:0"}),
}


@pytest.mark.parametrize("mapping_class", [ao.QConfigMapping, quantization.QConfigMapping])
@pytest.mark.parametrize("case", SET)
def test_every_setting_counts(case, mapping_class):
    (method, *args), off = SET[case]
    mapping = mapping_class().set_global(quantization.default_static_qconfig)
    getattr(mapping, method)(*args, None)
    assert quantized_layers(mapping) == ALL - off


@pytest.mark.parametrize("case", SET)
def test_only_what_is_set_is_quantized_without_a_global_setting(case):
    (method, *args), on = SET[case]
    mapping = quantization.QConfigMapping()
    getattr(mapping, method)(*args, quantization.default_static_qconfig)
    assert quantized_layers(mapping) == on


def test_a_name_goes_before_a_regex_before_a_type():
    mapping = quantization.QConfigMapping().set_global(Scheme())
    mapping.set_object_type(nn.Conv2d, None).set_module_name_regex("a.*", Scheme(True))
    mapping.set_module_name("a.b", Scheme(observer="min_max"))
    read = read_mapping(mapping)
    classes = ("torch.nn.modules.conv.Conv2d",)
    schemes = [read.scheme_of(Layer("x", "conv2d", path, classes)) for path in ("a.b", "a", "c")]
    assert schemes == [Scheme(observer="min_max"), Scheme(True), None]
    assert read.scheme_of(Layer("x", "linear", "c")) == Scheme()


@pytest.mark.parametrize(
    ("config", "scheme"),
    [
        (qconfig(ao.HistogramObserver.with_args(reduce_range=False)), ("histogram", False)),
        (qconfig(ao.MinMaxObserver), ("min_max", False)),
        (qconfig(ao.MovingAverageMinMaxObserver), ("moving_average", False)),
        (
            qconfig(
                ao.MinMaxObserver.with_args(dtype=torch.qint8, qscheme=torch.per_tensor_symmetric)
            ),
            ("min_max", True),
        ),
        (
            qconfig(
                ao.FakeQuantize.with_args(
                    observer=ao.MovingAverageMinMaxObserver, quant_min=0, quant_max=255
                )
            ),
            ("moving_average", False),
        ),
    ],
)
def test_observers_of_torch_are_read(config, scheme):
    read = read_qconfig(config)
    assert (read.observer, read.symmetric) == scheme
    assert read.per_channel
    assert not read.dynamic


def test_arguments_of_observers_are_read():
    read = read_qconfig(qconfig(ao.HistogramObserver.with_args(bins=512)))
    assert dict(read.observer_args) == {"bins": 512}
    read = read_qconfig(qconfig(ao.MovingAverageMinMaxObserver.with_args(averaging_constant=0.5)))
    assert dict(read.observer_args) == {"averaging_constant": 0.5}


def test_weights_of_one_scale_are_read():
    weight = ao.MinMaxObserver.with_args(dtype=torch.qint8, qscheme=torch.per_tensor_symmetric)
    assert not read_qconfig(qconfig(ao.MinMaxObserver, weight)).per_channel


@pytest.mark.filterwarnings("ignore")
def test_the_whole_range_serves_those_who_reduce_it():
    """`reduce_range` is a default of torch for kernels that overflow."""
    assert read_qconfig(ao.get_default_qconfig("x86")).observer == "histogram"


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (ao.default_qconfig, "whole range"),
        (qconfig(ao.MinMaxObserver.with_args(dtype=torch.qint32)), "8-bit activations"),
        (qconfig(ao.NoopObserver), "an observer of activations"),
        (qconfig(WEIGHT), "an observer of activations"),
        (ao.float16_dynamic_qconfig, "dynamic quantization to 8 bits"),
        (qconfig(ao.MinMaxObserver, ao.HistogramObserver), "an observer of weights"),
        (qconfig(ao.MinMaxObserver, ao.MinMaxObserver), "symmetric int8 weights"),
        (qconfig(ao.MinMaxObserver, WEIGHT.with_args(ch_axis=1)), "axis 0"),
        (qconfig(ao.MinMaxObserver, WEIGHT.with_args(quant_min=-64, quant_max=63)), "whole range"),
        ("int8", "a QConfig"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_no_kernel_has_is_refused(config, reason):
    with pytest.raises(QuantizationError, match=reason):
        read_qconfig(config)


def test_dynamic_settings_are_recognised():
    assert is_dynamic(read_mapping(quantization.default_dynamic_qconfig_mapping))
    assert is_dynamic(read_mapping(quantization.default_dynamic_qconfig))
    assert is_dynamic(read_mapping(ao.default_dynamic_qconfig))
    assert not is_dynamic(read_mapping(quantization.default_static_qconfig))
    mixed = quantization.QConfigMapping().set_global(quantization.default_static_qconfig)
    mixed.set_module_name("head", quantization.default_dynamic_qconfig)
    with pytest.raises(QuantizationError, match="both in one mapping"):
        is_dynamic(read_mapping(mixed))


@torch.no_grad()
def test_a_dynamic_mapping_honours_types():
    mapping = quantization.QConfigMapping().set_global(quantization.default_dynamic_qconfig)
    mapping.set_module_name("head", None)
    net, x = Net().eval(), torch.randn(1, 3, 4, 4)
    rows = quantization.convert(quantization.prepare(net, mapping)).ipex_layers
    assert [(row["name"], row["quantized"]) for row in rows] == [("head", False)]
    assert not torch.equal(quantization.convert(quantization.prepare(net, mapping))(x), net(x))


def test_a_single_qconfig_is_a_mapping():
    prepared = quantization.prepare(
        Net().eval(), quantization.default_static_qconfig, torch.randn(1, 3, 4, 4)
    )
    assert {layer.name for layer in prepared.layer_decisions if layer.quantized} == ALL
