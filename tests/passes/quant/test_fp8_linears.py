"""The pass that places GEMMs on FP8 values: what it takes, what it leaves, and why."""

import pytest
import torch
from torch import nn

from ipex_inductor.lowerings.problem import selector_hook
from ipex_inductor.lowerings.quant import fp8_weights
from ipex_inductor.passes import joint
from ipex_inductor.quantization import QConfigMapping, Scheme, convert, prepare
from ipex_inductor.reporting import decisions

STATIC = {}
WEIGHTS = {"weight_only": True}


def quantize(model, x, **settings):
    mapping = QConfigMapping().set_global(Scheme(dtype=torch.float8_e4m3fn, **settings))
    prepared = prepare(model, mapping, example_inputs=x)
    with torch.no_grad():
        prepared(x)
    return convert(prepared)


def events():
    found = [event for report in decisions.reports() for event in report.events]
    return [(e.kind, e.subject, e.reason) for e in found if e.subject.startswith("fp8")]


def run(model, x, **options):
    options = {"strict": True, **options}
    with torch.no_grad():
        return torch.compile(model, backend="ipex", fullgraph=True, options=options)(x)


@pytest.mark.parametrize("settings", [STATIC, WEIGHTS], ids=["static", "weights"])
def test_switched_off_the_graph_computes_in_floating_point(settings):
    model, x = nn.Sequential(nn.Linear(16, 8)).eval(), torch.randn(4, 16)
    quantized = quantize(model, x, **settings)
    with torch.no_grad():
        want = quantized(x)
    # The bias is part of the GEMM's sum in one of them.
    torch.testing.assert_close(run(quantized, x, rules="-fp8"), want, rtol=1e-5, atol=1e-6)
    assert events() == []


@pytest.mark.parametrize("settings", [STATIC, WEIGHTS], ids=["static", "weights"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_kernels_it_is_right_and_the_reason_is_told(settings, dtype, monkeypatch):
    monkeypatch.setattr(fp8_weights, "why_not", lambda *_, **__: "no FP8 GEMM here")
    model, x = nn.Sequential(nn.Linear(16, 8)).eval().to(dtype), torch.randn(4, 16).to(dtype)
    quantized = quantize(model, x, **settings)
    with torch.no_grad():
        want = quantized(x)
    tolerance = torch.finfo(dtype).eps * 2
    torch.testing.assert_close(run(quantized, x), want, rtol=tolerance, atol=1e-5)
    name = "fp8 weights linear" if settings else "fp8 linear"
    assert events() == [("missed", name, "no FP8 GEMM here")]


class Read(nn.Module):
    """A product that is read twice, before and behind its cast."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(16, 8)

    def forward(self, x):
        y = self.a(x)
        return y, y.float() * 2, y.transpose(0, 1).contiguous()


@pytest.mark.sampled("dtype1")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_readers_of_a_result_get_it(dtype):
    model, x = Read().eval().to(dtype), torch.randn(4, 16).to(dtype)
    quantized = quantize(model, x)
    with torch.no_grad():
        want = quantized(x)
    for got, value in zip(run(quantized, x), want, strict=True):
        assert torch.equal(got, value)
        assert got.stride() == value.stride()
    assert events() == [("fired", "fp8 linear", "")]


def test_scales_of_rows_are_reported():
    model, x = nn.Sequential(nn.Linear(16, 8)).eval(), torch.randn(4, 16)
    quantized = quantize(model, x, dynamic=True)
    with torch.no_grad():
        want = quantized(x)
    assert torch.equal(run(quantized, x), want)
    assert events() == [("fired", "fp8 linear, scales of rows", "")]


@pytest.mark.parametrize(
    ("device", "arch", "packaged", "reason"),
    [
        ("cpu", "", False, None),
        ("cpu", "", True, "packages have no FP8 GEMMs"),
        ("xpu", "", False, "no FP8 GEMM for xpu yet"),
        ("cuda", "sm_80:NVIDIA-A100", False, "FP8 GEMMs are for sm_89 and later, not sm_80"),
        ("cuda", "sm_89:NVIDIA-L4", False, None),
        ("cuda", "sm_90:NVIDIA-H200", False, None),
        ("cuda", "sm_100:NVIDIA-B200", False, None),
    ],
)
def test_devices_without_kernels_have_a_reason(device, arch, packaged, reason, monkeypatch):
    monkeypatch.setattr(selector_hook, "arch_of", lambda _: arch)
    told = fp8_weights.why_not(packaged, torch.device(device))
    assert told is None if reason is None else (reason in told and "floating point" in told)


def test_the_switch_is_a_name_that_users_may_give():
    assert "fp8" in joint.SWITCHES
