"""FP8 inference on a GPU: static activations and FP8 weights, compared with CPUs."""

import pytest
import torch
from torch import nn

from ipex_inductor.ops.quant import fp8_steps
from ipex_inductor.quantization import QConfigMapping, Scheme, convert, prepare
from ipex_inductor.reporting import decisions

pytestmark = pytest.mark.gpu

E4M3 = torch.float8_e4m3fn
KINDS = {
    "fp8 linear": {},
    "fp8 weights linear": {"weight_only": True},
    "fp8 linear, scales of rows": {"dynamic": True},
}


@pytest.fixture(autouse=True)
def _has_fp8():
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("FP8 GEMMs need compute capability 8.9")


def fired():
    found = [event for report in decisions.reports() for event in report.events]
    return {e.subject for e in found if e.kind == "fired" and e.subject.startswith("fp8")}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_and_steps_are_those_of_cpus(dtype):
    weight = (torch.randn(33, 50) * 10.0 ** torch.arange(-16, 17)[:, None].div(4)).to(dtype)
    weight[3] = 0
    values, steps = fp8_steps.fp8_quantize_channels(weight)
    on_gpu, steps_on_gpu = fp8_steps.fp8_quantize_channels(weight.cuda())
    assert torch.equal(steps, steps_on_gpu.cpu())
    assert torch.equal(values.view(torch.uint8), on_gpu.cpu().view(torch.uint8))
    decoded = fp8_steps.decode_block(on_gpu, steps_on_gpu, dtype).cpu()
    assert torch.equal(decoded, fp8_steps.fp8_dequantize(values, steps, dtype))


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(64, 128, 48), (5, 40, 24), (1, 37, 7)])
def test_compiled_results_are_those_of_cpus(name, dtype, sizes):
    """Tensor cores of sm_89 and sm_90 keep about 14 bits of a sum of 32 products."""
    m, k, n = sizes
    model = nn.Sequential(nn.Linear(k, n), nn.ReLU(), nn.Linear(n, n, bias=False)).eval().to(dtype)
    x = torch.randn(2, m, k).to(dtype)
    mapping = QConfigMapping().set_global(Scheme(dtype=E4M3, observer="min_max", **KINDS[name]))
    prepared = prepare(model, mapping, example_inputs=x)
    with torch.no_grad():
        prepared(x)
        quantized = convert(prepared)
        want = quantized(x)
        quantized = quantized.cuda()
        run = torch.compile(quantized, backend="ipex", fullgraph=True, options={"strict": True})
        results = [run(x.cuda()).cpu() for _ in range(2)]
    assert torch.equal(*results)
    # A hidden number may be rounded to the next one in FP8: half a step of 1/16 of one of N terms.
    error = (results[0].double() - want.double()).norm() / want.double().norm()
    assert error < (2.0**-6 if dtype is torch.bfloat16 or "weights" not in name else 2.0**-8)
    assert fired() == {name}


@pytest.mark.parametrize("settings", [{}, {"weight_only": True}], ids=["static", "weights"])
def test_a_changed_weight_is_cast_anew(settings):
    model, x = nn.Sequential(nn.Linear(64, 32)).eval().bfloat16(), torch.randn(8, 64).bfloat16()
    mapping = QConfigMapping().set_global(Scheme(dtype=E4M3, **settings))
    prepared = prepare(model, mapping, example_inputs=x)
    with torch.no_grad():
        prepared(x)
        quantized = convert(prepared).cuda()
        run = torch.compile(quantized, backend="ipex")
        before = run(x.cuda())
        for parameter in quantized.parameters():
            parameter.neg_()  # weight and bias
        torch.testing.assert_close(run(x.cuda()), -before, rtol=2.0**-7, atol=2.0**-7)
