"""`ipex::round_balanced`: errors of rounding to 16 bits that cancel in each output channel."""

import pytest
import torch

from ipex_inductor.ops.pointwise.balanced_rounding import round_balanced

LAYOUTS = {
    "linear": ((96, 160), 0, torch.contiguous_format),
    "conv": ((64, 32, 3, 3), 0, torch.contiguous_format),
    "channels-last": ((64, 32, 3, 3), 0, torch.channels_last),
    "depthwise": ((64, 1, 3, 3), 0, torch.contiguous_format),
    "transposed conv": ((64, 32, 3, 3), 1, torch.contiguous_format),
    "one weight a channel": ((64, 1), 0, torch.contiguous_format),
}


def draw_weight(layout):
    """Return a weight in fp64 whose channels differ by orders of magnitude, and its channels."""
    shape, channels, memory_format = LAYOUTS[layout]
    scale = torch.logspace(-3, 1, shape[channels], dtype=torch.float64)
    weight = torch.randn(shape, dtype=torch.float64).movedim(channels, -1) * scale
    weight = weight.movedim(-1, channels).contiguous()
    return weight.to(memory_format=memory_format), channels


def sum_errors(weight, rounded, channels):
    """Return the sum of each channel's errors, over the channel's largest weight."""
    rows, errors = (x.movedim(channels, 0).flatten(1) for x in (weight, rounded.double() - weight))
    return (errors.sum(1) / rows.abs().amax(1)).abs()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_errors_cancel_and_no_weight_is_off_by_a_step(layout, dtype):
    torch.manual_seed(0)
    weight, channels = draw_weight(layout)
    rounded, nearest = round_balanced(weight, dtype, channels), weight.to(dtype)
    assert rounded.dtype == dtype
    assert rounded.shape == weight.shape
    assert rounded.stride() == weight.stride()
    # The second neighbor is less than a step off; the step of a number is at most its 2^-7th part
    # in bf16, and in fp16 its 2^-10th or, of a subnormal number, 2^-24.
    step = torch.finfo(dtype).eps * weight.abs() + 2.0**-24 * (dtype == torch.float16)
    assert ((rounded.double() - weight).abs() < step).all()
    balanced, plain = (sum_errors(weight, w, channels).mean() for w in (rounded, nearest))
    few = weight.numel() // weight.shape[channels] < 10
    # What remains is up to half the step of the last weight that was changed.
    if layout != "one weight a channel":  # whose nearest value nothing can balance
        assert balanced < plain * (1.0 if few else 0.2)
    # Errors of single weights grow little, as weights near the middle of a step are changed.
    errors = [float((w.double() - weight).square().sum()) for w in (rounded, nearest)]
    assert errors[0] <= errors[1] * (1.5 if few else 1.05)


def test_weights_that_the_dtype_holds_stay():
    weight = torch.randn(8, 40).bfloat16()
    assert torch.equal(round_balanced(weight.double(), torch.bfloat16, 0), weight)


@pytest.mark.parametrize("odd", [float("inf"), float("-inf"), float("nan"), 3.3895e38, 1e-45])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_channel_with_odd_values_is_rounded_to_nearest(odd, dtype):
    torch.manual_seed(0)
    weight = torch.randn(2, 300, dtype=torch.float64)
    alone = round_balanced(weight, dtype, 0)[1]
    weight[0, 7] = odd
    rounded, nearest = round_balanced(weight, dtype, 0), weight.to(dtype)
    assert rounded[0, 7].isnan() if odd != odd else rounded[0, 7] == nearest[0, 7]
    if not nearest[0].isfinite().all():
        torch.testing.assert_close(rounded[0], nearest[0], equal_nan=True, rtol=0, atol=0)
    assert torch.equal(rounded[1], alone)


def test_no_weights():
    assert round_balanced(torch.empty(0, 3).double(), torch.float16, 0).shape == (0, 3)
    assert round_balanced(torch.empty(3, 0).double(), torch.float16, 0).shape == (3, 0)
