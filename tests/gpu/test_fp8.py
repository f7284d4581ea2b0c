"""FP8 on a GPU: rounded as on CPUs, products of torch._scaled_mm, training in one graph."""

import copy

import pytest
import torch
from torch import nn

from ipex_inductor.errors import QuantizationError
from ipex_inductor.ops.quant import fp8
from ipex_inductor.quantization.fp8 import DelayedScaling, Format, fp8_autocast, prepare_fp8

pytestmark = pytest.mark.gpu

DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
RECIPE = DelayedScaling(amax_history_len=8)


@pytest.fixture(autouse=True)
def _has_fp8():
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("FP8 GEMMs need compute capability 8.9")


def special(dtype):
    """Ties, subnormals, numbers beyond the range, infinity and NaN."""
    grid = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    grid = torch.cat([grid, (grid[:-1] + grid[1:]) / 2, torch.tensor([1e9, -1e9, float("inf")])])
    return torch.cat([grid, torch.randn(1000) * 100]).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("of", [torch.float32, torch.bfloat16, torch.float16])
def test_values_are_those_of_cpus(dtype, of):
    x, scale = special(of), torch.tensor(1.7)
    values, amax = fp8.fp8_quantize(x, scale, dtype)
    on_gpu, amax_on_gpu = fp8.fp8_quantize(x.cuda(), scale.cuda(), dtype)
    # The sign and payload of NaN are no part of its value.
    same = values.view(torch.uint8) == on_gpu.cpu().view(torch.uint8)
    assert (same | values.float().isnan() & on_gpu.cpu().float().isnan()).all()
    assert torch.equal(amax.nan_to_num(), amax_on_gpu.cpu().nan_to_num())


@pytest.mark.parametrize("sizes", [(5, 7, 37), (16, 16, 16), (1, 24, 40), (300, 100, 513)])
@pytest.mark.parametrize("kinds", [(0, 0), (0, 1), (1, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
def test_products_of_any_size_are_those_of_cpus(sizes, kinds, dtype, bias):
    """Sums in fp32 differ in their order: each of K terms is off by a rounding of the sum."""
    m, n, k = sizes
    a8, _ = fp8.fp8_quantize(torch.randn(m, k), torch.tensor(64.0), DTYPES[kinds[0]])
    b8, _ = fp8.fp8_quantize(torch.randn(k, n), torch.tensor(64.0), DTYPES[kinds[1]])
    b = torch.randn(n) if bias else None
    arguments = a8, b8.t(), torch.tensor(0.02), torch.tensor(0.03), b, dtype, False
    on_gpu = [v.cuda() if isinstance(v, torch.Tensor) else v for v in arguments]
    want, got = fp8.fp8_gemm(*arguments).double(), fp8.fp8_gemm(*on_gpu).cpu().double()
    largest = (a8.double().abs() @ b8.double().abs()) * 6e-4
    bound = largest * k * 2**-23 + want.abs() * torch.finfo(dtype).eps + 1e-6
    # Tensor cores of sm_89 and sm_90 keep about 14 bits of a sum of 32 products.
    assert ((got - want).abs() <= bound + largest * 2**-13).all()


def test_two_operands_in_e5m2_are_refused():
    a8 = torch.ones(16, 16, device="cuda").to(torch.float8_e5m2)
    one = torch.ones((), device="cuda")
    with pytest.raises(QuantizationError, match="HYBRID"):
        fp8.fp8_gemm(a8, a8, one, one, None, torch.bfloat16, False)


def mlp():
    """K of 4 and 8: sums round alike in any order, so CPU and GPU agree bit for bit."""
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


def train(model, call, xs, recipe=RECIPE):
    for x in xs:
        with fp8_autocast(enabled=True, fp8_recipe=recipe, device=x.device.type):
            y = call(x)
        y.backward(torch.ones_like(y))
        model.zero_grad()


@pytest.mark.parametrize("format", [Format.HYBRID, Format.E4M3])
def test_scales_and_histories_are_those_of_cpus(format):
    model = prepare_fp8(mlp())
    twin = copy.deepcopy(model).cuda()
    xs = [torch.randn(8, 4) * 2.0 ** (n % 5) for n in range(40)]
    recipe = DelayedScaling(amax_history_len=8, fp8_format=format)
    train(model, model, xs, recipe)
    train(twin, twin, [x.cuda() for x in xs], recipe)
    for on_cpu, on_gpu in zip(model.buffers(), twin.buffers(), strict=True):
        assert torch.equal(on_cpu, on_gpu.cpu())


@pytest.mark.parametrize("inside", [False, True])
def test_training_in_one_graph_equals_eager_mode(inside):
    model = prepare_fp8(nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 40)).cuda())
    twin = copy.deepcopy(model)

    def run(call, x):
        with fp8_autocast(enabled=True, fp8_recipe=RECIPE):
            return call(x)

    function = (lambda x: run(twin, x)) if inside else twin
    compiled = torch.compile(function, backend="ipex", fullgraph=True)
    for factor in (1, 50, 3, 7):
        x = torch.randn(32, 64, device="cuda") * factor
        want = run(model, x)
        got = compiled(x) if inside else run(compiled, x)
        assert torch.equal(got, want)
        for y in (want, got):
            y.square().sum().backward()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)
    for p, q in zip(model.buffers(), twin.buffers(), strict=True):
        assert torch.equal(p, q)
