"""`prepare` and `convert` with dtype=torch.float8_e4m3fn: rows and channels with own scales."""

import copy
import io

import pytest
import torch
from torch import nn

from ipex_inductor.errors import QuantizationError
from ipex_inductor.ops.quant import fp8
from ipex_inductor.quantization import QConfigMapping, Scheme, convert, prepare

FP8 = Scheme(dynamic=True, dtype=torch.float8_e4m3fn)
MAPPING = QConfigMapping().set_global(FP8)
EPS = 2.0**-4  # half a step of three bits of mantissa


def mlp():
    return nn.Sequential(nn.Linear(40, 64), nn.ReLU(), nn.Linear(64, 10)).eval()


def quantize(model, mapping=MAPPING):
    return convert(prepare(model, mapping))


def rounded(x):
    """x as rows in E4M3 stand for it, in fp64."""
    values, inverse = fp8.fp8_quantize_rows(x)
    return values.double() * inverse.double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_are_rounded_by_their_own_scales(dtype):
    x = (torch.randn(6, 32) * 10.0 ** torch.arange(-3, 3)[:, None]).to(dtype)
    x[2] = 0
    error = (rounded(x) - x.double()).abs()
    # Numbers below 2^-6 of E4M3 are subnormal: their step is 2^-9, where the largest is 448.
    subnormal = x.double().abs().amax(1, keepdim=True) * (2.0**-10 / 448)
    assert (error <= x.double().abs() * EPS * 1.001 + subnormal).all()
    assert torch.equal(rounded(x)[2], torch.zeros(32, dtype=torch.float64))


@pytest.mark.parametrize("bias", [False, True])
def test_results_are_those_of_rounded_operands(bias):
    """Sums in fp32 are off by a rounding for each of 40 terms."""
    layer = nn.Linear(40, 24, bias=bias)
    x = torch.randn(2, 3, 40)
    with torch.no_grad():
        got = quantize(layer)(x)
    a, b = rounded(x.flatten(0, 1)), rounded(layer.weight.detach())
    want = a @ b.t() + (layer.bias.double() if bias else 0)
    bound = (a.abs() @ b.abs().t()) * 40 * 2**-24 + 1e-6
    assert ((got.flatten(0, 1).double() - want).abs() <= bound).all()


def test_a_network_stays_near_fp32():
    """Each operand is off by 1/16 at most, at random: 3 % of the norm is left on average."""
    model, x = mlp(), torch.randn(64, 40)
    with torch.no_grad():
        want, got = model(x), quantize(model)(x)
    assert 0 < (got - want).norm() / want.norm() < 0.06


def test_compiled_it_is_one_graph_with_the_same_results():
    model, x = quantize(mlp()), torch.randn(8, 40)
    compiled = torch.compile(model, backend="ipex", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(x), model(x))
        model[0].weight.mul_(-3)  # weights are quantized again
        assert torch.equal(compiled(x), model(x))


def test_autocast_sets_the_dtype_of_results():
    model, x = quantize(mlp()), torch.randn(8, 40)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert model(x).dtype is torch.bfloat16


def test_parameters_are_shared_and_the_model_is_pickled():
    model = mlp()
    quantized = quantize(model)
    assert quantized[0].weight is model[0].weight
    file, x = io.BytesIO(), torch.randn(2, 40)
    torch.save(quantized, file)
    file.seek(0)
    with torch.no_grad():
        for other in (torch.load(file, weights_only=False), copy.deepcopy(quantized)):
            assert torch.equal(other(x), quantized(x))


class Recurrent(nn.Module):
    """Layers of all kinds; the outputs of each are returned."""

    def __init__(self):
        super().__init__()
        self.lstm, self.linear, self.out = nn.LSTM(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.lstm(x)[0], self.linear(x), self.out(x)


def test_layers_that_are_switched_off_or_recurrent_stay_in_floating_point():
    model, x = Recurrent().eval(), torch.randn(3, 8)
    quantized = quantize(model, QConfigMapping().set_global(FP8).set_module_name("out", None))
    reasons = {row["name"]: row["reason"] for row in quantized.ipex_layers}
    assert reasons == {"lstm": "FP8 is for linear layers", "linear": "", "out": "switched off"}
    with torch.no_grad():
        pairs = zip(quantized(x), model(x), strict=True)
        assert [torch.equal(*pair) for pair in pairs] == [True, False, True]


def test_one_scale_of_a_weight_is_refused():
    with pytest.raises(QuantizationError, match=r"scheme of torch\.float8_e4m3fn"):
        Scheme(dtype=torch.float8_e4m3fn, dynamic=True, per_channel=False)


def test_other_dtypes_are_refused():
    with pytest.raises(QuantizationError, match="float8_e5m2"):
        Scheme(dynamic=True, dtype=torch.float8_e5m2)


@pytest.mark.parametrize("checked", ["test_faketensor", "test_aot_dispatch_dynamic"])
def test_fakes_are_right(checked):
    x = torch.randn(4, 6)
    a8, inverse = fp8.fp8_quantize_rows(x)
    torch.library.opcheck(torch.ops.ipex.fp8_quantize_rows.default, (x,), test_utils=checked)
    arguments = a8, a8, inverse, inverse, x[0, :4].contiguous(), torch.bfloat16
    torch.library.opcheck(torch.ops.ipex.fp8_gemm_rows.default, arguments, test_utils=checked)


def test_the_projection_of_attention_is_reported_as_not_quantized():
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    rows = {row["name"]: row for row in quantize(model).ipex_layers}
    assert {name: row["quantized"] for name, row in rows.items()} == {
        "self_attn.out_proj": False,
        "linear1": True,
        "linear2": True,
    }
    assert "MultiheadAttention" in rows["self_attn.out_proj"]["reason"]
