"""Ops on 8-bit integers: arranged weights, factors and scales, results beside plain arithmetic."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ipex_inductor.ops.common.defining import Arguments
from ipex_inductor.ops.common.epilogue import UNARY
from ipex_inductor.ops.quant import int8_scaled
from ipex_inductor.ops.quant.int8_operands import (
    PANEL,
    SCALES,
    UNIT,
    arranged_size,
    is_depthwise,
    plain_weight,
)
from support.int8_ops import (
    BF16,
    BOUNDS,
    F32,
    OTHER_SCALE,
    OTHER_ZERO_POINT,
    RESULT_ZERO_POINTS,
    S8,
    U8,
    X_SCALE,
    Case,
    Operands,
    ipex,
    make_operands,
    random_integers,
)

pytestmark = pytest.mark.unit

WEIGHTS = [
    ((5, 3), 1),
    ((16, 64), 1),
    ((33, 130), 1),
    ((20, 3, 7, 7), 1),
    ((64, 4, 3, 3), 8),
    ((40, 8, 1, 1), 2),
    ((12, 5, 2, 3, 1), 1),
    ((32, 1, 3, 3), 32),
    ((64, 1, 5, 3), 32),
    ((32, 1, 1, 1), 32),  # arranged as it lies
    ((6, 1, 3, 3), 1),  # one channel, but one group
]


@pytest.mark.parametrize(("shape", "groups"), WEIGHTS, ids=str)
def test_an_arranged_weight_is_undone(shape: tuple[int, ...], groups: int) -> None:
    weight = random_integers(shape, S8)
    arranged = ipex.int8_weight(weight, groups)
    assert arranged.shape == (arranged_size(weight, groups),)
    assert torch.equal(plain_weight(arranged, shape, groups), weight)
    turned = weight.transpose(0, 1).contiguous().transpose(0, 1)  # strides do not matter
    assert torch.equal(ipex.int8_weight(turned, groups), arranged)


def test_an_arranged_weight_lies_in_panels_of_four_bytes() -> None:
    """[panel, K / 4, 16, 4], where K counts taps, then channels; zeros behind both ends."""
    weight = random_integers((20, 6, 3, 2), S8)
    panels = ipex.int8_weight(weight, 1).view(-1, UNIT // 4, PANEL, 4)
    assert len(panels) == 2
    for out, channel, tap in ((0, 0, 0), (19, 5, 5), (16, 2, 3), (7, 4, 1)):
        k = tap * 6 + channel
        element = panels[out // PANEL, k // 4, out % PANEL, k % 4]
        assert element == weight.flatten(2)[out, channel, tap]
    assert panels.count_nonzero() == weight.count_nonzero()


def test_a_depthwise_weight_has_its_channels_last() -> None:
    weight = random_integers((8, 1, 3, 3), S8)
    assert is_depthwise(weight.shape, 8)
    assert torch.equal(ipex.int8_weight(weight, 8).view(3, 3, 8), weight[:, 0].permute(1, 2, 0))


WINDOW = (1, 1), (0, 0), (1, 1), 1
# Each line differs from the others in the kernel, the types, or the epilogue.
CASES = [
    Case((2, 6, 7, 9), (5, 6, 1, 1), WINDOW),
    Case((2, 6, 7, 9), (5, 6, 3, 3), ((1, 1), (1, 1), (1, 1), 1), unary="relu"),
    Case((1, 3, 15, 13), (8, 3, 7, 7), ((2, 2), (3, 3), (1, 1), 1), x_dtype=S8, dtype=S8),
    Case((1, 6, 9, 8), (8, 6, 3, 2), ((2, 1), (2, 0), (2, 3), 1), dtype=F32),
    Case((1, 8, 6, 6), (12, 2, 3, 3), ((1, 1), (1, 1), (1, 1), 4), S8, BF16, unary="silu"),
    Case((2, 8, 6, 6), (8, 1, 3, 3), ((1, 1), (1, 1), (1, 1), 8), other=U8, binary="add"),
    Case((2, 8, 6, 6), (16, 1, 3, 3), ((2, 2), (1, 1), (1, 1), 8), S8, S8, S8, "add", "relu"),
    Case((1, 4, 3, 5, 4), (6, 4, 2, 3, 3), ((1, 2, 1), (1, 0, 1), (1, 1, 1), 1), dtype=F32),
    Case((5, 30), (7, 30), other=F32, binary="add", unary="gelu"),
    Case((2, 3, 30), (7, 30), x_dtype=S8, dtype=F32, other=BF16, binary="mul"),
    Case((30,), (7, 30), dtype=BF16),
    Case((5, 30), (7, 30), other=S8, binary="sub", unary="leaky_relu", scalars=(0.1,)),
    Case((5, 30), (7, 30), unary="hardtanh", scalars=(-1.0, 2.0)),
    Case((2, 5, 30), (7, 30), (), S8, F32, F32, "add", "gelu", by_row=True),
    Case((5, 30), (7, 30), (), S8, U8, by_row=True),
]


def compute_plainly(operands: Operands) -> Tensor:
    """Return the result in fp64 by torch's own functions on dequantized values, not quantized."""
    case = operands.case
    x_scale = X_SCALE if operands.row_scales is None else operands.row_scales.double()
    x = (operands.x.double() - operands.x_zero_point) * x_scale
    scale = operands.weight_scale.double().view(-1, *[1] * (len(case.weight) - 1))
    weight, bias = operands.plain.double() * scale, operands.bias.double()
    if case.window:
        stride, padding, dilation, groups = case.window
        zeros = [0] * len(stride)
        words = stride, padding, dilation, False, zeros, groups
        result = torch.convolution(x, weight, bias, *words)
    else:
        result = F.linear(x, weight, bias)
    if operands.other is not None:
        other = operands.other.double()
        if case.other in (U8, S8):
            other = (other - OTHER_ZERO_POINT) * OTHER_SCALE
        result = {"add": torch.add, "sub": torch.sub, "mul": torch.mul}[case.binary](result, other)
    return UNARY[case.unary].fn(result, *case.scalars)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_references_are_dequantized_arithmetic(case: Case) -> None:
    operands = make_operands(case)
    result, exact = operands.by_reference(), compute_plainly(operands)
    if case.dtype not in BOUNDS:
        # Factors and offsets are rounded to fp32, whose sum cancels to a tenth at most; then once.
        rtol = {F32: 1e-6, BF16: 2**-8}[case.dtype]
        torch.testing.assert_close(result.double(), exact, rtol=rtol, atol=1e-5)
        return
    steps = exact / operands.result_scale
    least, most = BOUNDS[case.dtype]
    expected = (steps.round() + RESULT_ZERO_POINTS[case.dtype]).clamp(least, most)
    differs = result.double() != expected
    # fp32 factors move a step by less than a thousandth, so only what is a tie up to that differs.
    assert (result.double() - expected).abs().max() <= 1
    assert ((steps - steps.floor() - 0.5).abs()[differs] < 1e-3).all()
    assert result.unique().numel() > 8


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("is_last", [True, False])
def test_fakes_have_sizes_dtypes_and_strides_of_results(case: Case, is_last: bool) -> None:
    operands = make_operands(case)
    if not is_last:
        operands.x = operands.x.contiguous()
    result = operands.by_reference()
    with torch._subclasses.FakeTensorMode() as mode:
        for name in ("x", "weight", "factors", "scales", "other", "row_scales"):
            value = getattr(operands, name)
            setattr(operands, name, None if value is None else mode.from_tensor(value))
        fake = operands.by_reference()
    assert (fake.shape, fake.dtype, fake.stride()) == (
        (result.shape, result.dtype, result.stride())
    )


@pytest.mark.parametrize(("shape", "groups"), WEIGHTS, ids=str)
def test_fakes_of_weights_factors_and_scales(shape: tuple[int, ...], groups: int) -> None:
    weight, one, zero = random_integers(shape, S8), torch.ones(()), torch.zeros((), dtype=int)

    def results(weight: Tensor, one: Tensor, zero: Tensor) -> list[Tensor]:
        factors = ipex.int8_factors(one, zero, weight, one, None, None, 0, groups, [])
        scales = ipex.int8_scales(zero, None, None, one, zero, 0, 255)
        return [ipex.int8_weight(weight, groups), factors, scales]

    with torch._subclasses.FakeTensorMode() as mode:
        fakes = results(*map(mode.from_tensor, (weight, one, zero)))
    for fake, value in zip(fakes, results(weight, one, zero), strict=True):
        assert (fake.shape, fake.dtype, fake.stride()) == (
            (value.shape, value.dtype, value.stride())
        )


@pytest.mark.parametrize("dtype", [U8, S8])
@pytest.mark.parametrize("is_last", [True, False])
@pytest.mark.parametrize("ceil_mode", [True, False])
def test_max_pools_are_torchs(dtype: torch.dtype, is_last: bool, ceil_mode: bool) -> None:
    x = random_integers((2, 5, 9, 8), dtype)
    x = x.contiguous(memory_format=torch.channels_last) if is_last else x
    words = [3, 2], [2, 3], [1, 0], [1, 2], ceil_mode
    result = ipex.int8_max_pool(x, *words)
    assert torch.equal(result.double(), F.max_pool2d(x.double(), *words))
    assert result.dtype == dtype
    with torch._subclasses.FakeTensorMode() as mode:
        fake = ipex.int8_max_pool(mode.from_tensor(x), *words)
    assert (fake.shape, fake.dtype, fake.stride()) == (result.shape, dtype, result.stride())
    assert result.is_contiguous(memory_format=torch.channels_last) == is_last


def test_factors_of_a_weight() -> None:
    """The offset holds the bias and the zero point of x, the shift of signed x too."""
    weight = torch.tensor([[1, -2, 3], [100, 100, -128]], dtype=S8)
    scale, zero_point = torch.tensor(0.5), torch.tensor(10)
    own = torch.tensor([2.0, 4.0])
    bias = torch.tensor([0.25, -1.0])
    factors = ipex.int8_factors(scale, zero_point, weight, own, None, bias, 0, 1, [])
    assert factors.tolist() == [[1, 2], [0.25 - 2 * 10, -1 - 2 * 72 * 10]]
    shifted = ipex.int8_factors(scale, zero_point - 20, weight, own, None, None, 128, 1, [])
    assert shifted.tolist() == [[1, 2], [-2 * 118, -2 * 72 * 118]]


def test_factors_of_a_weight_with_one_scale() -> None:
    weight = random_integers((6, 4), S8)
    numbers = torch.tensor(0.5), torch.tensor(3)
    for one in (torch.tensor(0.25), torch.tensor([0.25])):
        factors = ipex.int8_factors(*numbers, weight, one, None, None, 0, 1, [])
        each = ipex.int8_factors(*numbers, weight, torch.full((6,), 0.25), None, None, 0, 1, [])
        assert torch.equal(factors, each)


def test_depthwise_factors_hold_the_bias_alone() -> None:
    """Their kernel subtracts the zero point before it multiplies."""
    weight, bias = random_integers((4, 1, 3, 3), S8), torch.randn(4)
    numbers = torch.tensor(0.5), torch.tensor(77), weight, torch.ones(4), None, bias
    for shift in (0, 128):
        factors = ipex.int8_factors(*numbers, shift, 4, [])
        assert torch.equal(factors, torch.stack([torch.full((4,), 0.5), bias]))


def test_scales_of_affine_and_symmetric_results() -> None:
    """Bounds are distances from the zero point, so that it is added behind the rounding."""
    number = torch.tensor
    affine = ipex.int8_scales(number(7), number(0.5), number(3), number(0.25), number(100), 0, 255)
    assert affine.tolist() == [7, 0.5, 3, 4, 100, -100, 155]
    symmetric = ipex.int8_scales(number(-7), None, None, number(2.0), number(0), -128, 127)
    assert symmetric.tolist() == [-7, 0, 0, 0.5, 0, -128, 127]
    floats = ipex.int8_scales(number(7), None, None, None, None, 0, 0)
    assert floats.tolist() == [7, 0, 0, 1, 0, 0, 0]
    one_element = ipex.int8_scales(*(number([n]) for n in (7, 0.5, 3, 0.25, 100)), 0, 255)
    assert torch.equal(one_element, affine)
    assert affine.shape == (SCALES,)


@pytest.mark.parametrize("dtype", [U8, S8, F32, BF16])
@pytest.mark.parametrize("a_dtype", [U8, S8])
@pytest.mark.parametrize("b_dtype", [U8, S8])
def test_products_of_two_activations(
    a_dtype: torch.dtype, b_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    a, b = random_integers((3, 5, 30), a_dtype), random_integers((3, 30, 7), b_dtype)
    number = torch.tensor
    bounds = BOUNDS.get(dtype, (0, 0))
    words = number(0.02), number(7), number(0.003), number(-3), number(0.05), number(20)
    scales = ipex.int8_bmm_scales(*words, *bounds)
    result = ipex.int8_bmm(a, b, scales, 0.125, dtype)
    exact = ((a.double() - 7) * 0.02) @ ((b.double() + 3) * 0.003) * 0.125
    if dtype in BOUNDS:
        exact = ((exact / 0.05).round() + 20).clamp(*bounds)
    # A tie is a step apart; bf16 is rounded once, the product of three scales in fp32.
    atol = 1.0 if dtype in BOUNDS else 1e-6
    torch.testing.assert_close(
        result.double(), exact, rtol=2**-8 * (dtype == BF16) + 1e-6, atol=atol
    )
    with torch._subclasses.FakeTensorMode() as mode:
        fake = ipex.int8_bmm(*map(mode.from_tensor, (a, b, scales)), 0.125, dtype)
    assert (fake.shape, fake.dtype, fake.stride()) == (result.shape, dtype, result.stride())


def test_row_factors_keep_the_bias_apart() -> None:
    weight, bias = torch.tensor([[1, -2, 3]], dtype=S8), torch.tensor([0.5])
    factors = ipex.int8_row_factors(weight, torch.tensor([2.0]), bias)
    assert factors.tolist() == [[2], [-2 * 2 * 128], [0.5]]
    assert ipex.int8_row_factors(weight, torch.tensor(2.0), None)[2].item() == 0


@pytest.mark.parametrize(
    ("channels", "image", "window", "padding"),
    [
        (3, (20, 22), (7, 7), (3, 3)),
        (3, (21, 23), (3, 3), (1, 1)),
        (4, (18, 17), (5, 3), (2, 1)),
        (1, (16, 16), (4, 4), (0, 0)),
        (3, (15, 16), (5, 5), (1, 1)),
    ],
)
def test_a_stride_is_folded_into_channels(
    channels: int, image: tuple[int, int], window: tuple[int, int], padding: tuple[int, int]
) -> None:
    """Sums are those of the convolution with stride 2, padded with the zero point."""
    x = random_integers((2, channels, *image), S8)
    weight = random_integers((8, channels, *window), S8)
    rows = F.pad(weight.flatten(2).transpose(1, 2), (0, 4 - channels)).flatten()
    call = Arguments(
        x=x,
        weight=rows,
        window=list(window),
        stride=[2, 2],
        padding=list(padding),
        dilation=[1, 1],
        scales=torch.tensor([-100.0]),
    )
    assert int8_scaled.may_fold_stride(channels, window, call.stride, call.dilation)
    joined, folded, size = int8_scaled._fold_stride(F.pad(x, (0, 0, 0, 0, 0, 4 - channels)), call)
    assert size == int8_scaled.folded_window(window, padding)
    kernel = folded.view(8, *size, 16).permute(0, 3, 1, 2)
    around = (padding[1], padding[1], padding[0], padding[0])
    padded = F.pad(x.double(), around, value=-100.0)
    expected = F.conv2d(padded, weight.double(), stride=2)
    assert torch.equal(F.conv2d(joined.double(), kernel.double()), expected)
