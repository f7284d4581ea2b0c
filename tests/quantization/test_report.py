"""`report`: noise against floating point, saturation, order, reasons; as table, JSON and page."""

import json
import math
import weakref

import pytest
import torch
from torch import nn

from ipex_inductor import quantization
from ipex_inductor.errors import QuantizationError
from ipex_inductor.inspection import layer_noise
from ipex_inductor.inspection.layer_kernels import NO_KERNEL, _assign
from ipex_inductor.inspection.layer_noise import Noise, Saturation, float_graph
from ipex_inductor.inspection.quantization_report import LayerReport, QuantizationReport
from support import html_check
from support.int8_models import ResNet, trained_like

DEFAULT = quantization.default_static_qconfig_mapping


class Net(nn.Module):
    """Two convolutions that are added, one of a kind without an int8 kernel, linear layers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.bn = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.left, self.right = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 1)
        self.up = nn.ConvTranspose2d(16, 16, 2, stride=2, dilation=2)
        self.wide, self.last = nn.Linear(16, 32), nn.Linear(32, 10)

    def forward(self, x):
        x = torch.relu(self.bn(self.stem(x)))
        y = torch.relu(self.left(x) + self.right(x))
        return self.last(nn.functional.gelu(self.wide(self.up(y).mean((2, 3)))))


class Two(nn.Module):
    """A product of two inputs, of which the second is a keyword argument."""

    def forward(self, a, b):
        return (a @ b).relu()


def images(count=3, size=8):
    torch.manual_seed(1)
    return [torch.randn(2, 3, size, size) for _ in range(count)]


def quantize(model, data, mapping=DEFAULT):
    args = data[0] if isinstance(data[0], tuple) else (data[0],)
    prepared = quantization.prepare(model.eval(), mapping, example_inputs=args)
    with torch.no_grad():
        for item in data:
            prepared(*(item if isinstance(item, tuple) else (item,)))
    return quantization.convert(prepared)


def report(*args, **kwargs):
    return quantization.report(*args, with_kernel_times=False, **kwargs)


@torch.no_grad()
@pytest.mark.parametrize(
    "mapping",
    [
        DEFAULT,
        quantization.QConfigMapping().set_global(quantization.Scheme(bias_correction=True)),
        quantization.get_smooth_quant_qconfig_mapping(),
    ],
    ids=["default", "bias correction", "SmoothQuant"],
)
def test_the_graph_without_rounding_is_the_model(mapping):
    model, data = Net().eval(), images()
    exact = float_graph(quantize(model, data, mapping))
    torch.testing.assert_close(exact(data[0]), model(data[0]))


@torch.no_grad()
def test_noise_is_that_of_the_outputs_over_all_batches():
    model, data = Net().eval(), images()
    quantized = quantize(model, data)
    last = report(quantized, data).layers[-1]
    exact, rounded = (torch.cat([m(x) for x in data]) for m in (model, quantized))
    ratio = exact.square().sum() / (exact - rounded).square().sum()
    assert last.name == "last:linear:0"
    assert last.signal_to_noise == pytest.approx(10 * ratio.log10().item(), rel=1e-3)


def test_a_reference_with_the_same_weights_gives_the_same_noise():
    model, data = Net().eval(), images()
    quantized = quantize(model, data)
    derived, compared = report(quantized, data), report(quantized, data, reference=model)
    for a, b in zip(derived.layers, compared.layers, strict=True):
        assert a.signal_to_noise == pytest.approx(b.signal_to_noise, abs=1e-2)


def test_a_reference_with_other_weights_counts():
    data = images()
    quantized, other = quantize(Net(), data), Net().eval()
    nn.init.normal_(other.last.weight)
    layers = report(quantized, data, reference=other).layers
    assert layers[-1].signal_to_noise < 10 < layers[-2].signal_to_noise


def test_layers_are_in_the_order_of_execution_with_their_reasons():
    mapping = quantization.QConfigMapping().set_global(quantization.Scheme())
    mapping.set_module_name("right", None)
    layers = report(quantize(Net(), images(), mapping), images()).layers
    names = [layer.name.partition(":")[0] for layer in layers]
    assert names == ["stem", "left", "right", "up", "wide", "last"]
    floating = {layer.name: layer.reason for layer in layers if not layer.quantized}
    assert floating == {"right:conv2d:0": "switched off by the configuration"}


def test_scales_are_those_of_the_model():
    quantized = quantize(Net(), images())
    scales = quantized.tensor_scales()
    for layer in report(quantized, images()).layers:
        for tensor in [*layer.inputs, *([layer.output] if layer.output else [])]:
            assert (tensor.scale, tensor.zero_point) == scales[tensor.name][:2]
            assert tensor.dtype == "uint8"


def test_values_beyond_the_range_of_the_calibration_are_saturated():
    mapping = quantization.QConfigMapping().set_global(quantization.Scheme(observer="min_max"))
    quantized = quantize(Net(), images(), mapping)
    # Zero points are rounded, so the largest value may be half a step beyond the range.
    assert report(quantized, images()).layers[0].saturated < 0.001
    wide = report(quantized, [10 * x for x in images()]).layers[0]
    assert wide.inputs[0].saturated > 0.5
    assert wide.saturated == max(wide.inputs[0].saturated, wide.output.saturated)


def test_saturation_counts_rounded_values():
    saturation = Saturation()
    saturation.add(torch.tensor([-0.4, 0.0, 255.4, 255.6, 300.0, -0.6]), 1.0, 0, 0, 255)
    assert (saturation.values, saturation.beyond) == (6, 3)


def test_noise_without_a_finite_ratio():
    assert Noise(1.0, 0.0).decibels == math.inf
    assert Noise(0.0, 1.0).decibels == -math.inf
    assert Noise(math.nan, 1.0).decibels is None
    assert Noise(100.0, 1.0).decibels == pytest.approx(20)


def test_a_residual_network():
    model = trained_like(ResNet(), 3, 32, 32)
    data = [torch.randn(2, 3, 32, 32)]
    layers = report(quantize(model, data), data, reference=model).layers
    assert all(layer.signal_to_noise > 15 for layer in layers)


def test_items_are_inputs_pairs_with_labels_or_all_inputs_of_a_model():
    x = images(1)[0]
    quantized = quantize(Net(), [x])
    alone = report(quantized, x)
    for data in ([x], [(x, torch.zeros(2))], iter([(x,)]), [{"x": x}]):
        assert report(quantized, data) == alone
    pair = (torch.randn(4, 8), torch.randn(8, 4))
    quantized = quantize(Two(), [pair])
    for data in ([pair], [(pair, torch.zeros(4))]):
        (layer,) = report(quantized, data).layers
        assert len(layer.inputs) == 2
        assert layer.signal_to_noise > 20


def test_embedding_bags_have_noise_of_their_weight():
    model, data = (
        nn.Sequential(nn.EmbeddingBag(50, 16), nn.Linear(16, 4)),
        [torch.arange(20).view(4, 5)],
    )
    bag, linear = report(quantize(model, data), data).layers
    assert bag.operator == "embedding_bag"
    assert math.inf > bag.signal_to_noise > linear.signal_to_noise


def test_activations_are_dropped_behind_their_last_reader(monkeypatch):
    alive = []
    run_nodes = layer_noise._run_nodes

    def watch(module, inputs):
        for node, arguments, value in run_nodes(module, inputs):
            if isinstance(value, torch.Tensor) and value.shape[:1] == (64,):
                alive.append(weakref.ref(value))
            most.append(sum(ref() is not None for ref in alive))
            yield node, arguments, value

    most = []
    monkeypatch.setattr(layer_noise, "_run_nodes", watch)
    model = nn.Sequential(*(layer for _ in range(12) for layer in (nn.Linear(8, 8), nn.ReLU())))
    data = [torch.randn(64, 8)]
    report(quantize(model, data), data)
    assert len(alive) > 60
    assert max(most) <= 8


def test_the_table_fits_in_80_columns():
    text = str(report(quantize(Net(), images()), images()))
    assert max(map(len, text.splitlines())) <= 80
    for part in ("stem:conv2d:0", "int8", "dB", "saturated", "! lowest", "ms: not measured"):
        assert part in text
    assert "layer: " not in text, "records in place of a table"


def test_a_long_name_keeps_its_end_in_the_table():
    layer = LayerReport(
        "encoder.layers.11.attention.output:linear:0", "linear", True, "", (), None, 1
    )
    text = str(QuantizationReport("title", 1, (layer,)))
    assert "attention.output:linear:0" in text
    assert max(map(len, text.splitlines())) <= 80


def test_reasons_are_numbered_below_the_table():
    mapping = quantization.QConfigMapping().set_global(quantization.Scheme())
    mapping.set_object_type(nn.Conv2d, None)
    text = str(report(quantize(Net(), images(), mapping), images()))
    assert text.count("float [1]") == 3
    assert text.count("[1] switched off by the configuration") == 1


def test_json_has_no_infinite_numbers():
    layers = (
        LayerReport("a", "linear", True, "", (), None, math.inf),
        LayerReport("b", "linear", True, "", (), None, -math.inf),
        LayerReport("c", "linear", False, "why", (), None, None),
    )
    made = json.loads(QuantizationReport("title", 1, layers).to_json(), parse_constant=pytest.fail)
    assert [layer["signal_to_noise"] for layer in made["layers"]] == [None] * 3
    assert [layer["is_exact"] for layer in made["layers"]] == [True, False, False]
    assert {layer["kernel"] for layer in made["layers"]} == {"not measured"}
    assert made["worst"] == ["b"]


def test_the_page_is_whole_and_escaped():
    made = report(quantize(Net(), images()), images())
    strange = LayerReport("<b>:linear:0", "linear", False, "a < b", (), None, None)
    html = QuantizationReport("x<y", 1, (*made.layers, strange)).to_html()
    html_check.check(html)
    assert "&lt;b&gt;:linear:0" in html
    assert "<b>:linear" not in html


@pytest.mark.parametrize(
    ("model", "data", "expected"),
    [
        (nn.Linear(2, 2), [], "statically quantized model"),
        (None, [], "data"),
    ],
)
def test_bad_arguments_are_typed_errors(model, data, expected):
    with pytest.raises(QuantizationError, match=expected):
        report(model or quantize(Net(), images()), data)


def test_a_reference_with_other_layers_is_refused():
    with pytest.raises(QuantizationError, match="other layers"):
        report(quantize(Net(), images()), images(), reference=nn.Flatten())


def test_a_dynamic_model_is_refused():
    mapping = quantization.default_dynamic_qconfig_mapping
    dynamic = quantization.convert(quantization.prepare(nn.Linear(2, 2), mapping))
    with pytest.raises(QuantizationError, match="no scales"):
        report(dynamic, [torch.ones(1, 2)])


def test_a_kernel_of_two_layers_goes_to_the_one_without():
    assert _assign({"x": ["a", "b"], "y": ["a"]}) == {"x": "b", "y": "a"}
    assert _assign({"x": ["a", "b"], "y": []}) == {"x": "a"}


def test_kernels_of_a_compiled_model_are_named_and_timed():
    data = images(1, 16)
    quantized = quantize(Net(), data)
    made = quantization.report(torch.compile(quantized, backend="ipex"), data)
    layers = {layer.name.partition(":")[0]: layer for layer in made.layers}
    if not layers["stem"].kernel.startswith("int8"):
        pytest.skip(layers["stem"].kernel_reason)
    kernels = {name: layer.kernel for name, layer in layers.items()}
    assert kernels["stem"] == "int8 conv+relu+quantize"
    assert sorted([kernels["left"], kernels["right"]]) == [
        "int8 conv+add+relu+quantize",
        "int8 conv+quantize",
    ]
    assert kernels["wide"] == "int8 linear+gelu+quantize"
    assert kernels["last"] == "int8 linear"
    reason = "kernels of transposed convolutions have no dilation"
    assert layers["up"].kernel_reason == reason
    timed = {name for name, layer in layers.items() if layer.milliseconds}
    assert timed >= {"stem", "left", "right", "wide", "last"}
    text = str(made)
    assert f"[1] {reason}" in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_layer_without_a_kernel_says_why():
    class MatrixTimesVector(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            y = self.linear(x)
            return torch.matmul(y, y[0])

    data = [torch.randn(4, 8)]
    quantized = quantize(MatrixTimesVector(), data)
    linear, product = quantization.report(quantized, data).layers
    assert (linear.kernel, linear.kernel_reason) == ("int8 linear+quantize", "")
    assert (product.operator, product.kernel_reason) == ("matmul", NO_KERNEL)
