"""FP8 with steps that are powers of two: quantize, dequantize, decode blocks of a weight."""

import pytest
import torch
import torch.nn.functional as F

from ipex_inductor.ops.quant import fp8_steps
from support.fp8_rounding import check_sums, power_step, round_channels, round_e4m3

CODES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def special():
    """All numbers of E4M3, ties between them, numbers beyond the range, infinity."""
    grid = CODES.float().nan_to_num().sort().values
    beyond = torch.tensor([449.0, -1e9, float("inf"), -0.0, 1e-30])
    return torch.cat([grid, (grid[1:] + grid[:-1]) / 2, beyond, torch.randn(500) * 50])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("exponent", [0, -5, 7])
def test_activations_are_rounded_to_even_and_saturated(dtype, exponent):
    x, step = special().to(dtype), torch.tensor(2.0**exponent)
    values = fp8_steps.fp8_quantize_tensor(x, step)
    assert torch.equal(values.double(), round_e4m3(x.double() / 2.0**exponent))
    exact = fp8_steps.fp8_dequantize(values, step, torch.float32)
    assert torch.equal(exact.double(), values.double() * 2.0**exponent)


def test_nan_stays_nan():
    values = fp8_steps.fp8_quantize_tensor(torch.tensor([1.0, float("nan")]), torch.tensor(1.0))
    assert values.float().isnan().tolist() == [False, True]


def test_steps_are_the_least_powers_of_two_that_fit():
    amax = torch.cat([torch.rand(1000) * 1e3, 448 * 2.0 ** torch.arange(-20, 20), torch.ones(1)])
    step = fp8_steps.compute_step(amax)
    assert torch.equal(step.double(), power_step(amax))
    assert (amax / step <= 448).all()
    assert (amax / step > 224).all()
    assert fp8_steps.compute_step(torch.zeros(2)).tolist() == [fp8_steps.SMALLEST_STEP] * 2
    assert fp8_steps.compute_step(torch.tensor([float("nan"), float("inf")])).isnan().all()


@pytest.mark.parametrize("dtype", FLOATS)
def test_each_output_channel_has_a_step(dtype):
    weight = (torch.randn(7, 33) * 10.0 ** torch.arange(-3, 4)[:, None]).to(dtype)
    weight[2] = 0
    values, steps = fp8_steps.fp8_quantize_channels(weight)
    rounded = values.double() * steps.double()
    assert torch.equal(rounded[2], torch.zeros(33, dtype=torch.float64))
    others = [0, 1, 3, 4, 5, 6]
    assert torch.equal(rounded[others], round_channels(weight[others]))


def test_a_weight_without_columns_has_steps():
    values, steps = fp8_steps.fp8_quantize_channels(torch.randn(3, 0))
    assert (values.shape, steps.shape) == ((3, 0), (3, 1))
    assert (
        fp8_steps.fp8_weight_linear(torch.ones(2, 0), values, steps, None).tolist() == [[0] * 3] * 2
    )


def test_a_channel_with_nan_has_nan_alone():
    weight = torch.ones(3, 4)
    weight[0, 1], weight[1, 2] = float("nan"), float("inf")
    values, steps = fp8_steps.fp8_quantize_channels(weight)
    result = fp8_steps.fp8_weight_linear(torch.ones(2, 4), values, steps, None)
    assert result.isnan().tolist() == [[True, True, False]] * 2


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("flush", [False, True])
def test_blocks_are_decoded_bit_for_bit(dtype, flush):
    values = CODES[~CODES.float().isnan()].view(2, 127)
    steps = torch.tensor([[2.0**-9], [2.0**5]])
    want = fp8_steps.fp8_dequantize(values, steps, dtype)
    torch.set_flush_denormal(flush)
    try:
        got = fp8_steps.decode_block(values, steps, dtype)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("block", [fp8_steps.BLOCK, 100, 1])
def test_a_weight_in_fp8_multiplies_as_its_numbers_do(dtype, bias, block, monkeypatch):
    monkeypatch.setattr(fp8_steps, "BLOCK", block)
    x, weight = torch.randn(5, 40).to(dtype), torch.randn(24, 40).to(dtype)
    b = torch.randn(24).to(dtype) if bias else None
    got = fp8_steps.fp8_weight_linear(x, *fp8_steps.fp8_quantize_channels(weight), b)
    assert got.dtype is dtype
    check_sums(got, x.double(), round_channels(weight), b)


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_gemm_scales_sums_as_its_operands_are_scaled(dtype):
    """Powers of two scale sums without rounding: the bits are those of dequantized operands."""
    x8, x_step = fp8_steps.fp8_quantize_tensor(torch.randn(6, 96), torch.tensor(2.0**-6)), 2.0**-6
    weight8, steps = fp8_steps.fp8_quantize_channels(torch.randn(40, 96))
    step = torch.tensor(x_step)
    operands = [
        fp8_steps.fp8_dequantize(*pair, torch.float32) for pair in ((x8, step), (weight8, steps))
    ]
    got = fp8_steps.fp8_linear(x8, weight8, step, steps, None, dtype)
    assert torch.equal(got, F.linear(*operands).to(dtype))


@pytest.mark.parametrize("checked", ["test_faketensor", "test_aot_dispatch_dynamic"])
def test_fakes_are_right(checked):
    ops, x, step = torch.ops.ipex, torch.randn(4, 6), torch.tensor(0.5)
    values, steps = fp8_steps.fp8_quantize_channels(x)
    bias = torch.randn(4)
    for op, arguments in {
        ops.fp8_quantize_tensor.default: (x.t(), step),
        ops.fp8_quantize_channels.default: (x,),
        ops.fp8_dequantize.default: (values, steps, torch.bfloat16),
        ops.fp8_linear.default: (values, values, step, steps, bias, torch.bfloat16),
        ops.fp8_weight_linear.default: (x, values, steps, bias),
    }.items():
        torch.library.opcheck(op, arguments, test_utils=checked)
