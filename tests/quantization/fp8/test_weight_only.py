"""Weights in FP8 beside activations in floating point: values, memory, files, refusals."""

import json

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import ipex_inductor
from ipex_inductor import quantization
from ipex_inductor.errors import QuantizationError
from ipex_inductor.ops.quant import fp8_steps
from ipex_inductor.quantization import QConfigMapping, Scheme, convert, prepare
from ipex_inductor.reporting import decisions
from ipex_inductor.templates.tensor_reader import freed
from support.fp8_rounding import check_sums, round_channels

E4M3 = torch.float8_e4m3fn
CAPTURED = Scheme(dtype=E4M3, weight_only=True)
UNCAPTURED = Scheme(dtype=E4M3, weight_only=True, dynamic=True)
SCHEMES = pytest.mark.parametrize("scheme", [CAPTURED, UNCAPTURED], ids=["captured", "uncaptured"])


def quantize(model, x, scheme=CAPTURED):
    mapping = QConfigMapping().set_global(scheme)
    return convert(prepare(model, mapping, example_inputs=x))  # needs no calibration


def compiled(model, **options):
    options = {"strict": True, **options}
    return torch.compile(model, backend="ipex", fullgraph=True, options=options)


def reasons_of(subject):
    found = [event for report in decisions.reports() for event in report.events]
    return [(e.kind, e.reason) for e in found if e.subject == subject]


@SCHEMES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_results_are_those_of_rounded_weights(scheme, dtype, bias):
    model = nn.Sequential(nn.Linear(40, 24, bias=bias)).eval().to(dtype)
    x = torch.randn(2, 3, 40).to(dtype)
    quantized = quantize(model, x, scheme)
    weight = round_channels(model[0].weight.detach())
    b = model[0].bias.detach() if bias else None
    with torch.no_grad():
        for run in (quantized, compiled(quantized)):
            got = run(x)
            assert got.dtype is dtype
            check_sums(got, x.double(), weight, b)  # blocks of columns may sum in another order
    assert reasons_of("fp8 weights linear") == [("fired", "")]


def test_inputs_that_are_not_contiguous_are_one_gemm_too():
    model, x = nn.Sequential(nn.Linear(8, 24)).eval(), torch.randn(4, 8, 5)
    quantized = quantize(model, x.transpose(1, 2))
    with torch.no_grad():
        got = compiled(quantized)(x.transpose(1, 2))
    weight = round_channels(model[0].weight.detach())
    check_sums(got, x.transpose(1, 2).double(), weight, model[0].bias.detach())
    assert reasons_of("fp8 weights linear") == [("fired", "")]


@SCHEMES
def test_sizes_and_weights_change_without_another_graph(scheme):
    model = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 4)).eval()
    quantized = quantize(model, torch.randn(6, 16), scheme)
    counter = CompileCounterWithBackend("ipex")
    run = torch.compile(quantized, backend=counter, dynamic=True)
    with torch.no_grad():
        for batch in (6, 3, 9):
            x = torch.randn(batch, 16)
            torch.testing.assert_close(run(x), quantized(x), rtol=1e-5, atol=1e-6)
            model[0].weight.mul_(-3)
            torch.testing.assert_close(run(x), quantized(x), rtol=1e-5, atol=1e-6)
    assert counter.frame_count == 1


def test_autocast_multiplies_in_bf16_by_the_same_weight():
    model, x = nn.Sequential(nn.Linear(40, 24)).eval(), torch.randn(6, 40)
    quantized = quantize(model, x)
    weight, b = round_channels(model[0].weight.detach()), model[0].bias.detach().bfloat16()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for run in (quantized, compiled(quantized)):
            check_sums(run(x).bfloat16(), x.bfloat16().double(), weight, b)


@pytest.mark.sampled("dtype0-uncaptured", "dtype1-captured")
@SCHEMES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_a_byte_for_each_weight(scheme, dtype, monkeypatch):
    """Neither the plain weights nor dequantized ones stay, and no call makes a whole one."""
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(4))).eval().to(dtype)
    x = torch.randn(8, 256).to(dtype)
    quantized = quantize(model, x, scheme)
    want = quantized(x).detach()
    monkeypatch.setattr(fp8_steps, "BLOCK", 256 * 16)
    decode, decoded = fp8_steps.decode_block, []
    monkeypatch.setattr(
        fp8_steps,
        "decode_block",
        lambda values, *rest: decoded.append(values.numel()) or decode(values, *rest),
    )
    before = ipex_inductor.derived_memory()
    run = compiled(quantized, drop_plain_weights=True)
    with torch.no_grad():
        # Sums in another order, three times; bf16 is rounded to 8 bits behind each layer.
        bound = 2.0**-18 if dtype is torch.float32 else 2.0**-6
        assert (run(x) - want).norm() <= bound * want.norm()
        run(x)
    assert all(map(freed.is_freed, model.parameters()))
    stored = ipex_inductor.derived_memory() - before
    elements = 4 * 256 * 256
    steps = 4 * 256 * 4
    assert elements <= stored <= elements + steps
    assert stored < elements * dtype.itemsize * 0.6
    assert set(decoded) == {256 * 16}


def test_the_plain_weights_stay_unless_they_are_dropped():
    model, x = nn.Sequential(nn.Linear(16, 8)).eval(), torch.randn(2, 16)
    quantized = quantize(model, x)
    with torch.no_grad():
        compiled(quantized)(x)
    assert quantized.state_dict()["0.weight"].dtype is torch.float32
    assert not any(map(freed.is_freed, model.parameters()))


def test_report_and_files_name_weights(tmp_path):
    model = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    x = torch.randn(8, 32)
    quantized = quantize(model, x)
    report = quantization.report(quantized, [x])
    assert {(row.kind, row.kernel) for row in report.layers} == {
        ("fp8 weights", "fp8 weights linear")
    }
    assert "fp8 weights linear" in str(report)
    quantization.save(quantized, tmp_path / "net")
    content = json.loads((tmp_path / "net.json").read_text())
    assert all(entry["weight_only"] for entry in content["schemes"].values())
    other = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 4))
    loaded = quantization.load(tmp_path / "net", other)
    quantized.save(tmp_path / "net.pt")
    with torch.no_grad():
        assert torch.equal(loaded(x), quantized(x))
        assert torch.equal(torch.jit.load(tmp_path / "net.pt")(x), quantized(x))


def test_weights_in_fp8_stand_beside_integers():
    model = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    x = torch.randn(8, 32)
    mapping = QConfigMapping().set_global(Scheme(observer="min_max")).set_module_name("2", CAPTURED)
    prepared = prepare(model, mapping, example_inputs=x)
    with torch.no_grad():
        prepared(x)
        quantized = convert(prepared)
        run = compiled(quantized)(x)
    assert [layer.kind for layer in quantized.layer_decisions] == ["int8", "fp8 weights"]
    torch.testing.assert_close(run, quantized(x), rtol=1e-5, atol=1e-5)
    assert reasons_of("fp8 weights linear") == [("fired", "")]


def test_recurrent_layers_stay_in_floating_point():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru, self.linear = nn.GRU(8, 8), nn.Linear(8, 4)

        def forward(self, x):
            return self.linear(self.gru(x)[0])

    rows = quantize(Net().eval(), torch.randn(3, 2, 8), UNCAPTURED).ipex_layers
    assert {row["name"]: row["quantized"] for row in rows} == {"gru": False, "linear": True}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": torch.float8_e5m2, "weight_only": True}, "E5M2 has 2 bits of mantissa"),
        ({"dtype": torch.float16}, "Choose one of these"),
        ({"weight_only": True}, "weight_only=False in a scheme of torch.int8"),
        ({"dtype": E4M3, "per_channel": False}, "per_channel=True"),
        ({"dtype": E4M3, "bias_correction": True}, "bias_correction=False"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings, message):
    with pytest.raises(QuantizationError, match=message):
        Scheme(**settings)


def test_weights_with_nan_are_refused():
    model = nn.Sequential(nn.Linear(4, 4)).eval()
    with torch.no_grad():
        model[0].weight[1, 1] = float("nan")
    with pytest.raises(QuantizationError, match="NaN or infinite elements"):
        quantize(model, torch.randn(2, 4))
