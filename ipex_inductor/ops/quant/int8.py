"""Convolutions and linear layers on 8-bit integers, with their epilogue and requantization.

The integers of an activation stand for `(x - zero_point) * scale`, those of a weight for
`w * scale[o]`. A result is computed in fp32 from exact integer sums, and rounded once.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ipex_inductor import compat
from ipex_inductor.ops.common import epilogue
from ipex_inductor.ops.common.defining import Arguments, fake, op
from ipex_inductor.ops.conv.conv import CHANNELS_LAST
from ipex_inductor.ops.quant.int8_borders import pad_sizes, split_padding
from ipex_inductor.ops.quant.int8_operands import INTEGERS, SHIFT, is_in_panels, plain_weight


@op("int8_conv")
def int8_conv(
    x: Tensor,
    weight: Tensor,
    factors: Tensor,
    scales: Tensor,
    other: Tensor | None,
    window: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    binary: str,
    unary: str,
    scalars: list[float],
    dtype: torch.dtype,
) -> Tensor:
    """Return `unary(binary(convolution(x, w) + bias, other), *scalars)` of integers.

    Args:
        x: [B, C, *size] in uint8 or int8, over two or three dimensions.
        weight: [O, C / groups, *window] as `ipex::int8_weight` arranges it.
        factors: [2, O] or [3, O] of `ipex::int8_factors`.
        scales: [7] of `ipex::int8_scales`.
        other: as the result, in fp32, bf16, uint8 or int8.
        window: size of the kernel.
        stride: of each dimension.
        padding: of each dimension; or of each dimension's begin, then of each one's end.
        dilation: of each dimension.
        groups: number of groups.
        binary: name in `ops/common/epilogue.py`.
        unary: name in `ops/common/epilogue.py`.
        scalars: arguments of the unary.
        dtype: of the result: fp32, bf16, or uint8 or int8 by the scales.

    Returns:
        [B, O, *size']: channels-last if x is, else contiguous.
    """
    outs = factors.shape[1]
    plain = _subtract_zero_points(
        plain_weight(weight, [outs, x.shape[1] // groups, *window], groups), factors
    )
    convolve = F.conv2d if x.dim() == 4 else F.conv3d
    values = F.pad(x.double() - scales[0], pad_sizes(padding, len(stride)))
    sums = convolve(values, plain, None, stride, 0, dilation, groups)
    total = plain.flatten(1).sum(1)
    result = _finish(
        sums, x, total, factors[:2], scales, other, 1, groups, (binary, unary, scalars)
    )
    return _like(x, quantize(result, scales, dtype))


@fake(int8_conv)
def _(call: Arguments) -> object:
    sizes = [call.x.shape[0], call.factors.shape[1]]
    begins, ends = split_padding(call.padding, len(call.stride))
    both = [begin + end for begin, end in zip(begins, ends, strict=True)]
    axes = zip(call.x.shape[2:], call.window, call.stride, both, call.dilation, strict=True)
    for size, taps, stride, padding, dilation in axes:
        sizes.append((size + padding - dilation * (taps - 1) - 1) // stride + 1)
    return _like(call.x, call.x.new_empty(sizes, dtype=call.dtype))


@op("int8_linear")
def int8_linear(
    x: Tensor,
    weight: Tensor,
    factors: Tensor,
    scales: Tensor,
    other: Tensor | None,
    row_scales: Tensor | None,
    binary: str,
    unary: str,
    scalars: list[float],
    dtype: torch.dtype,
) -> Tensor:
    """Return `unary(binary(x @ w.T + bias, other), *scalars)` of integers.

    Args:
        x: [..., K] in uint8 or int8.
        weight: [N, K] as `ipex::int8_weight` arranges it.
        factors: [2, N] or [3, N] of `ipex::int8_factors`; with `row_scales` [3, N] of
            `int8_row_factors`.
        scales: [7] of `ipex::int8_scales`.
        other: as the result, in fp32, bf16, uint8 or int8.
        row_scales: [..., 1] in fp32, the scale of each row of x, which is int8 then; or None.
        binary: name in `ops/common/epilogue.py`.
        unary: name in `ops/common/epilogue.py`.
        scalars: arguments of the unary.
        dtype: of the result: fp32, bf16, or uint8 or int8 by the scales.

    Returns:
        [..., N], contiguous.
    """
    plain = plain_weight(weight, [factors.shape[1], x.shape[-1]], 1)
    words = binary, unary, scalars
    if row_scales is not None:
        product = F.linear(x.double(), plain.double() * factors[0].double()[:, None])
        value = (product * row_scales.double() + factors[2].double()).float()
        result = apply_epilogue(value, scales, other, words)
    else:
        centered = _subtract_zero_points(plain, factors)
        sums = F.linear(x.double() - scales[0], centered)
        result = _finish(sums, x, centered.sum(1), factors[:2], scales, other, -1, 1, words)
    return quantize(result, scales, dtype).contiguous()


@fake(int8_linear)
def _(call: Arguments) -> object:
    return call.x.new_empty((*call.x.shape[:-1], call.factors.shape[1]), dtype=call.dtype)


@op("int8_bmm")
def int8_bmm(a: Tensor, b: Tensor, scales: Tensor, factor: float, dtype: torch.dtype) -> Tensor:
    """Return `a @ b * factor` of integers.

    Args:
        a: [B, M, K] in uint8 or int8.
        b: [B, K, N] in uint8 or int8.
        scales: [8] of `ipex::int8_bmm_scales`.
        factor: multiplies the result.
        dtype: of the result: fp32, bf16, or uint8 or int8 by the scales.

    Returns:
        [B, M, N], contiguous.
    """
    a_values, b_values = a.double() - scales[2], b.double() - scales[3]
    both = scales[0] * scales[1] * factor
    return quantize((a_values @ b_values * both).float(), scales[1:], dtype)


@fake(int8_bmm)
def _(call: Arguments) -> object:
    return call.a.new_empty((*call.a.shape[:2], call.b.shape[2]), dtype=call.dtype)


@op("int8_max_pool")
def int8_max_pool(
    x: Tensor,
    window: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    ceil_mode: bool,
) -> Tensor:
    """Return the maxima of windows of [B, C, H, W] in uint8 or int8, in the memory format of x.

    Args:
        x: the activation.
        window: size of the window.
        stride: of each dimension.
        padding: of each dimension; pixels there are never the maximum.
        dilation: of each dimension.
        ceil_mode: whether windows may begin within the last stride.
    """
    pooled = F.max_pool2d(x.float(), window, stride, padding, dilation, ceil_mode)
    return _like(x, pooled.to(x.dtype))


@fake(int8_max_pool)
def _(call: Arguments) -> object:
    words = call.window, call.stride, call.padding, call.dilation, call.ceil_mode
    pooled = F.max_pool2d(call.x.new_empty(call.x.shape, dtype=torch.float32), *words)
    return _like(call.x, call.x.new_empty(pooled.shape))


def _subtract_zero_points(weight: Tensor, factors: Tensor) -> Tensor:
    """Return a weight in fp64 without its zero points, which `factors` may have as third line.

    On a GPU weights have none, and further lines are of pixels at the border.
    """
    if len(factors) == 2 or not is_in_panels(weight):
        return weight.double()
    return weight.double() - factors[2].double().view(-1, *[1] * (weight.dim() - 1))


def _finish(
    sums: Tensor,
    x: Tensor,
    totals: Tensor,
    factors: Tensor,
    scales: Tensor,
    other: Tensor | None,
    axis: int,
    groups: int,
    epilogue_words: tuple[str, str, Sequence[float]],
) -> Tensor:
    """Return the epilogue of exact sums of `(x - zero point) * w`.

    Args:
        sums: in fp64.
        x: the activation.
        totals: [O], the sum of each output channel's weights.
        factors: [2, O].
        scales: [7].
        other: the addend, or None.
        axis: the dimension of output channels.
        groups: number of groups.
        epilogue_words: binary, unary, and scalars of the unary.
    """
    shape = [1] * sums.dim()
    shape[axis] = -1
    factor, offset = (row.double().view(shape) for row in factors)
    # The offset holds the zero point times the totals, which these sums do not contain.
    is_depthwise_sum = groups > 1 and groups == x.shape[1]
    is_shifted = x.dtype == torch.int8 and is_in_panels(x)
    shift = scales[0].double() + (SHIFT if is_shifted else 0)
    more = 0.0 if is_depthwise_sum else factor * totals.view(shape) * shift
    value = (sums * factor + offset + more).float()
    return apply_epilogue(value, scales, other, epilogue_words)


def apply_epilogue(
    value: Tensor,
    scales: Tensor,
    other: Tensor | None,
    epilogue_words: tuple[str, str, Sequence[float]],
) -> Tensor:
    """Return `unary(binary(value, other), *scalars)`, of an addend in integers by its scale.

    Args:
        value: in fp32.
        scales: [7] of `ipex::int8_scales`.
        other: the addend, or None.
        epilogue_words: binary, unary, and scalars of the unary.
    """
    if other is not None and other.dtype in INTEGERS:
        other = (other.float() - scales[2]) * scales[1]
    return epilogue.apply(value, None if other is None else other.float(), *epilogue_words)


def quantize(value: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return values in `dtype`: integers by the scales [7] of a result, or floats."""
    if dtype not in INTEGERS:
        return value.to(dtype)
    steps = torch.round(value * scales[3]).clamp(scales[5], scales[6])
    return (steps + scales[4]).to(dtype)


def _like(x: Tensor, result: Tensor) -> Tensor:
    """Return `result` in the memory format of `x`."""
    last = CHANNELS_LAST[x.dim()]
    is_last = compat.is_channels_last(x) and not x.is_contiguous()
    return result.contiguous(memory_format=last if is_last else torch.contiguous_format)
