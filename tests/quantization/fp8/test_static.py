"""Static FP8: calibrated activations, weights per channel, compiled to GEMMs on FP8 values."""

import json
import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional

from ipex_inductor import quantization
from ipex_inductor.errors import QuantizationError, SummaryFileError
from ipex_inductor.quantization import QConfigMapping, Scheme, convert, prepare
from ipex_inductor.quantization.scheme import TensorScale, fp8_scale_of_range
from ipex_inductor.reporting import decisions
from support.fp8_rounding import check_sums, round_channels, round_tensor

FP8 = Scheme(dtype=torch.float8_e4m3fn, observer="min_max")
MAPPING = QConfigMapping().set_global(FP8)


class Net(nn.Module):
    """Linear layers with and without a bias, a residual, a tensor that two layers read."""

    def __init__(self, residual=True):
        super().__init__()
        self.residual = residual
        self.up, self.down = nn.Linear(40, 64), nn.Linear(64, 40, bias=False)
        self.left, self.right = nn.Linear(40, 24), nn.Linear(40, 24)

    def forward(self, x):
        x = self.down(torch.relu(self.up(x))) + (x if self.residual else 0)
        return self.left(x), self.right(x)


def quantize(model, x, mapping=MAPPING, batches=3):
    prepared = prepare(model, mapping, example_inputs=x)
    with torch.no_grad():
        for _ in range(batches):
            prepared(torch.randn_like(x))
    return convert(prepared)


def compiled(model, **settings):
    return torch.compile(
        model, backend="ipex", fullgraph=True, options={"strict": True}, **settings
    )


def events(kind="fired"):
    """Subjects and reasons of decisions about FP8."""
    found = [event for report in decisions.reports() for event in report.events]
    return [(e.subject, e.reason) for e in found if e.kind == kind and e.subject.startswith("fp8")]


@pytest.mark.sampled("False-dtype1", "True-dtype0", "True-dtype2")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
def test_results_are_those_of_rounded_operands(dtype, bias):
    model = nn.Sequential(nn.Linear(40, 24, bias=bias)).eval().to(dtype)
    x = torch.randn(2, 3, 40).to(dtype)
    quantized = quantize(model, x)
    ((scale, zero_point, _, is_fp8),) = quantized.tensor_scales().values()
    assert (zero_point, is_fp8) == (0, True)
    with torch.no_grad():
        got, run = quantized(x), compiled(quantized)(x)
    assert got.dtype is dtype
    b = model[0].bias.detach() if bias else None
    check_sums(got, round_tensor(x, scale), round_channels(model[0].weight.detach()), b)
    # GEMM, bias and cast are the same ones, and powers of two scale sums without rounding.
    assert torch.equal(run, got)
    assert events() == [("fp8 linear", "")]


@pytest.mark.sampled("None-dtype0", "False-dtype1")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dynamic", [False, None])
def test_a_network_compiles_to_the_same_bits(dtype, dynamic):
    # Inductor keeps a sum in fp32 until it is rounded to FP8, which eager rounds to bf16 before.
    model = Net(residual=dtype is torch.float32).eval().to(dtype)
    quantized = quantize(model, torch.randn(8, 40).to(dtype))
    run = compiled(quantized, dynamic=dynamic)
    with torch.no_grad():
        for batch in (8, 3, 1, 5) if dynamic is None else (8, 1):
            x = torch.randn(batch, 40).to(dtype)
            for got, want, exact in zip(run(x), quantized(x), model(x), strict=True):
                assert torch.equal(got, want)
                # Operands are off by 1/16 at most: 3 % of the norm for each of three layers.
                assert 0 < (want - exact).norm() / exact.norm() < 0.12
    assert set(events()) == {("fp8 linear", "")}
    assert len(events()) == 4 * len(decisions.reports())


def test_a_changed_weight_is_cast_anew_and_nothing_recompiles():
    model, x = Net().eval(), torch.randn(8, 40)
    quantized = quantize(model, x)
    counter = CompileCounterWithBackend("ipex")
    run = torch.compile(quantized, backend=counter)
    with torch.no_grad():
        before = run(x)[0]
        for change in (lambda w: w.mul_(-3), lambda w: w.copy_(torch.randn_like(w))):
            change(model.up.weight)
            got, want = run(x)[0], quantized(x)[0]
            assert torch.equal(got, want)
            assert not torch.equal(got, before)
        model.load_state_dict(Net().state_dict())
        assert torch.equal(run(x)[0], quantized(x)[0])
    assert counter.frame_count == 1


def test_weights_are_cast_once_and_stay_in_floating_point():
    model, x = Net().eval(), torch.randn(8, 40)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    quantized = quantize(model, x)
    assert quantized.up.weight is model.up.weight
    assert quantized.state_dict().keys() == state.keys()
    with torch.no_grad():
        compiled(quantized)(x)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    reasons = [
        event.reason
        for report in decisions.reports()
        for event in report.events
        if event.subject == "weight preprocessing"
    ]
    # Values and steps of 4 weights, reciprocals of the steps of 3 activations.
    assert reasons == ["11 tensors, 0.0 MiB, of 7 weights"]


def test_autocast_multiplies_the_same_operands():
    """bf16 holds E4M3 times a power of two, so the casts of autocast change no operand."""
    model, x = nn.Sequential(nn.Linear(40, 24, bias=False)).eval(), torch.randn(6, 40)
    quantized = quantize(model, x)
    ((scale, *_),) = quantized.tensor_scales().values()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for run in (quantized, compiled(quantized)):
            got = run(x)
            operands = round_tensor(x, scale), round_channels(model[0].weight.detach())
            check_sums(got.bfloat16(), *operands, None)


class Functional(nn.Module):
    """Matrix products of all spellings with parameters."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.randn(16, 8))
        self.b, self.bias = nn.Parameter(torch.randn(8, 16)), nn.Parameter(torch.randn(8))

    def forward(self, x):
        return (
            functional.linear(x, self.b, self.bias),
            torch.addmm(self.bias, x, self.a),
            x @ self.a,
        )


def test_functional_calls_count():
    model, x = Functional().eval(), torch.randn(5, 16)
    quantized = quantize(model, x)
    assert [layer.kind for layer in quantized.layer_decisions] == ["fp8"] * 3
    ((scale, *_),) = quantized.tensor_scales().values()
    with torch.no_grad():
        results, run = quantized(x), compiled(quantized)(x)
    weights = model.b, model.a.t(), model.a.t()
    biases = model.bias.detach(), model.bias.detach(), None
    for got, again, weight, bias in zip(results, run, weights, biases, strict=True):
        check_sums(got, round_tensor(x, scale), round_channels(weight.detach()), bias)
        check_sums(again, round_tensor(x, scale), round_channels(weight.detach()), bias)
    assert len(events()) == 3


class Mixed(nn.Module):
    """A convolution, an embedding bag, a product of two activations, a linear layer."""

    def __init__(self):
        super().__init__()
        self.conv, self.linear = nn.Conv2d(3, 8, 3), nn.Linear(8, 8)
        self.bag = nn.EmbeddingBag(10, 8)

    def forward(self, image, indices):
        x = self.conv(image).flatten(2).transpose(1, 2)
        return self.linear(x) @ x.transpose(1, 2), self.bag(indices)


def test_other_layers_keep_their_dtype_and_say_why(op_by_op):
    model, inputs = Mixed().eval(), (torch.randn(2, 3, 6, 6), torch.randint(10, (2, 4)))
    prepared = prepare(model, MAPPING, example_inputs=inputs)
    with torch.no_grad():
        prepared(*inputs)
        quantized = convert(prepared)
        run = torch.compile(quantized, backend="ipex")  # Dynamo breaks at embedding bags
        for got, want in zip(run(*inputs), quantized(*inputs), strict=True):
            torch.testing.assert_close(got, want)
    reasons = {layer.operator: layer.reason for layer in quantized.layer_decisions}
    assert reasons == {
        "conv2d": "FP8 is for linear layers: convolutions have no FP8 kernel",
        "embedding_bag": "FP8 is for linear layers: embedding bags have no FP8 kernel",
        "linear": "",
        "matmul": "FP8 is for linear layers: products of two activations have no FP8 kernel",
    }
    assert events() == [("fp8 linear", "")]


def test_a_product_with_factors_stays_in_floating_point():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.linear = nn.Parameter(torch.randn(8, 16)), nn.Linear(8, 4)

        def forward(self, x):
            return torch.addmm(x[:, :1], x, self.weight, alpha=2), self.linear(x)

    quantized = quantize(Scaled().eval(), torch.randn(5, 8))
    reasons = [layer.reason for layer in quantized.layer_decisions]
    assert reasons == ["FP8 is for linear layers: addmm with alpha or beta has no FP8 kernel", ""]


def test_batch_norms_are_folded_first():
    model = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8)).eval()
    model[1].running_var.uniform_(0.5, 2)
    x = torch.randn(6, 16)
    quantized = quantize(model, x)
    with torch.no_grad():
        assert torch.equal(compiled(quantized)(x), quantized(x))
    assert [layer.quantized for layer in quantized.layer_decisions] == [True]


@pytest.mark.parametrize("observer", ["min_max", "moving_average", "histogram", "percentile"])
def test_observers_find_powers_of_two(observer):
    scheme = Scheme(dtype=torch.float8_e4m3fn, observer=observer)
    model, x = nn.Linear(32, 8).eval(), torch.randn(4096, 32)
    quantized = quantize(model, x, QConfigMapping().set_global(scheme), batches=1)
    ((scale, *_),) = quantized.tensor_scales().values()
    assert torch.frexp(torch.tensor(scale)).mantissa == 0.5
    assert 2.0**-9 <= scale <= 2.0**-6  # the largest of so many normal numbers is about 4.5


def test_outliers_are_saturated_where_that_costs_less():
    """A range of 64 has a step of 2^-2: values below 2^-8, all but one, would round to steps."""
    scheme = Scheme(dtype=torch.float8_e4m3fn, observer="histogram")
    prepared = prepare(
        nn.Linear(1, 1).eval(), QConfigMapping().set_global(scheme), torch.ones(2, 1)
    )
    values = torch.full((100000, 1), 0.0025)
    values[0] = 0.5
    with torch.no_grad():
        prepared(values)
    ((scale, *_),) = prepared.tensor_scales().values()
    assert scale <= fp8_scale_of_range(0, 0.5).scale


def test_report_names_kernels_and_scales(op_by_op):
    model, x = Net().eval(), torch.randn(8, 40)
    quantized = quantize(model, x)
    report = quantization.report(quantized, [x])
    rows = {layer.name: layer for layer in report.layers}
    assert {(row.kind, row.kernel, row.kernel_reason) for row in rows.values()} == {
        ("fp8", "fp8 linear", "")
    }
    for row in rows.values():
        assert [tensor.dtype for tensor in row.inputs] == ["fp8"]
        assert 20 < row.signal_to_noise < 45  # of three bits of mantissa: about 30 dB
    assert "fp8 linear" in str(report)
    assert "layers in fp8" in report.to_html()
    assert {layer["kind"] for layer in json.loads(report.to_json())["layers"]} == {"fp8"}


def test_files_hold_the_configuration(tmp_path):
    model, x = Net().eval(), torch.randn(8, 40)
    quantized = quantize(model, x)
    quantization.save(quantized, tmp_path / "net")
    content = json.loads((tmp_path / "net.json").read_text())
    assert content["version"] == 2  # an older package refuses it
    assert {entry["dtype"] for entry in content["schemes"].values()} == {"float8_e4m3fn"}
    assert all(entry["is_fp8"] for entry in content["tensors"].values())
    loaded = quantization.load(tmp_path / "net", Net())
    assert loaded.tensor_scales() == quantized.tensor_scales()
    quantized.save(tmp_path / "net.pt")
    script = torch.jit.load(tmp_path / "net.pt")
    exported = torch.export.export(quantized, (x,)).module()
    with torch.no_grad():
        for other in (loaded, script, exported):
            for got, want in zip(other(x), quantized(x), strict=True):
                assert torch.equal(got, want)


def test_a_summary_of_scales_replaces_calibration(tmp_path):
    model, x = Net().eval(), torch.randn(8, 40)
    prepared = prepare(model, MAPPING, example_inputs=x)
    prepared(x)
    prepared.save_qconf_summary(tmp_path / "scales.json")
    again = prepare(model, MAPPING, example_inputs=x)
    again.load_qconf_summary(tmp_path / "scales.json")
    with torch.no_grad():
        assert torch.equal(convert(again)(x)[0], convert(prepared)(x)[0])
    integers = prepare(model, quantization.default_static_qconfig_mapping, example_inputs=x)
    with pytest.raises(SummaryFileError, match="of the other dtype"):
        integers.load_qconf_summary(tmp_path / "scales.json")
    with pytest.raises(QuantizationError, match="dtype that the model was prepared with"):
        again.set_tensor_scales({"input:0": TensorScale(1.0, 0, True)})


def test_a_model_that_was_not_calibrated_is_refused():
    prepared = prepare(Net().eval(), MAPPING, example_inputs=torch.randn(8, 40))
    with pytest.raises(QuantizationError, match="a calibrated model"):
        convert(prepared)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_without_a_scale_are_refused(value):
    model, x = Net().eval(), torch.randn(8, 40)
    prepared = prepare(model, MAPPING, example_inputs=x)
    bad = x.clone()
    bad[0, 0] = value
    with pytest.raises(QuantizationError, match="finite activations"):
        prepared(bad)
    prepared(x)
    with torch.no_grad():
        model.up.weight[3, 3] = value
    with pytest.raises(QuantizationError, match=r"weight of 'up:linear:0'"):
        convert(prepared)


def test_nan_in_a_call_reaches_the_result():
    model, x = Net().eval(), torch.randn(8, 40)
    quantized = quantize(model, x)
    x[1, 2] = float("nan")
    with torch.no_grad():
        for run in (quantized, compiled(quantized)):
            assert run(x)[0].isnan().all(1).tolist() == [False, True] + [False] * 6


def test_integers_and_fp8_do_not_mix():
    mapping = QConfigMapping().set_global(FP8).set_module_name("up", Scheme())
    with pytest.raises(QuantizationError, match="int8 or in FP8"):
        prepare(Net().eval(), mapping, example_inputs=torch.randn(8, 40))


def test_layers_that_are_switched_off_stay_in_floating_point():
    mapping = QConfigMapping().set_global(FP8).set_module_name("up", None)
    quantized = quantize(Net().eval(), torch.randn(8, 40), mapping)
    reasons = {layer.name: layer.reason for layer in quantized.layer_decisions}
    assert reasons["up:linear:0"] == "switched off by the configuration"
    assert list(reasons.values()).count("") == 3


@pytest.mark.parametrize("settings", [{}, {"weight_only": True}], ids=["static", "weights"])
def test_gradients_are_refused(settings):
    mapping = QConfigMapping().set_global(Scheme(dtype=torch.float8_e4m3fn, **settings))
    model, x = Net().eval(), torch.randn(8, 40)
    quantized = quantize(model, x, mapping)
    with pytest.raises(QuantizationError, match=r"torch\.no_grad"):
        quantized(x)[0].sum().backward()
    with pytest.raises(BackendCompilerFailed, match=r"torch\.no_grad"):
        compiled(quantized)(x)


@pytest.mark.sampled("shape0", "shape1")
@pytest.mark.parametrize("shape", [(40,), (0, 40), (2, 3, 4, 40)])
def test_inputs_of_any_shape_are_multiplied_in_fp8(shape):
    model = nn.Sequential(nn.Linear(40, 24), nn.ReLU(), nn.Linear(24, 8)).eval()
    example, x = torch.randn([size or 5 for size in shape]), torch.randn(shape)
    quantized = quantize(model, example)
    with torch.no_grad():
        assert torch.equal(compiled(quantized)(x), quantized(x))
    assert events() == [("fp8 linear", "")] * 2


def test_smoothing_and_training_are_refused():
    mapping = quantization.get_smooth_quant_qconfig_mapping().set_global(FP8)
    with pytest.raises(QuantizationError, match="SmoothQuant"):
        prepare(Net().eval(), mapping, example_inputs=torch.randn(8, 40))
    with pytest.raises(QuantizationError, match="prepare_fp8"):
        quantization.prepare_qat(quantize(Net().eval(), torch.randn(8, 40)))


CACHED = """
import json, sys, torch
from torch import nn
from ipex_inductor import quantization
from ipex_inductor.quantization import QConfigMapping, Scheme
from ipex_inductor.reporting import decisions
torch.manual_seed(0)
model, x = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4)).eval(), torch.randn(4, 16)
mapping = QConfigMapping().set_global(Scheme(dtype=torch.float8_e4m3fn))
prepared = quantization.prepare(model, mapping, example_inputs=x)
with torch.no_grad():
    prepared(x)
    quantized = quantization.convert(prepared)
    model[0].weight.mul_(float(sys.argv[1]))
    same = torch.equal(torch.compile(quantized, backend="ipex")(x), quantized(x))
events = [event for report in decisions.reports() for event in report.events]
print(json.dumps([same, [e.subject for e in events if e.kind == "cache"]]))
"""


@pytest.mark.slow  # 20 seconds
def test_a_second_process_finds_the_graph_and_casts_its_own_weights(tmp_path):
    environment = {**os.environ, "IPEX_HOME": str(tmp_path)}
    for name in ("TORCHINDUCTOR_FX_GRAPH_CACHE", "TORCHINDUCTOR_AUTOGRAD_CACHE"):
        environment.pop(name, None)
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
    results = []
    for factor in ("1", "-2"):
        command = [sys.executable, "-c", CACHED, factor]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        results.append(json.loads(done.stdout.splitlines()[-1]))
    assert results == [[True, ["miss"]], [True, ["hit"]]]
