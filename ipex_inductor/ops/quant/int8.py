"""Convolutions and linear layers on 8-bit integers, with their epilogue and requantization.

The integers of an activation stand for `(x - zero_point) * scale`, those of a weight for
`w * scale[o]`. A result is computed in fp32 from exact integer sums, and rounded once.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ipex_inductor import compat
from ipex_inductor.errors import QuantizationError
from ipex_inductor.ops.common import epilogue
from ipex_inductor.ops.common.defining import Arguments, fake, op
from ipex_inductor.ops.conv.conv import CHANNELS_LAST
from ipex_inductor.ops.conv.geometry import sides

PANEL = 16  # output channels that lie together in an arranged weight
UNIT = 64  # K of an arranged weight is padded to a multiple of it
INTEGERS = (torch.uint8, torch.int8)
UNSIGNED = 255  # the largest of unsigned integers
SHIFT = 128  # added to signed activations, which kernels read unsigned
FEW_CHANNELS, WORD = 16, 4  # channels of an image that are few; bytes of a word
MOST_PRODUCT = 1 << 14  # of two integers of 8 bits
SCALES = 7  # elements that `int8_scales` returns


def is_depthwise(shape: Sequence[int], groups: int) -> bool:
    """Return whether a convolution on a weight [O, C / groups, *window] has one channel a group."""
    return groups > 1 and shape[1] == 1


def is_in_panels(weight: Tensor) -> bool:
    """Return whether a weight is arranged for kernels of CPUs; those of GPUs read rows."""
    return weight.device.type == "cpu"


def padded_channels(channels: int) -> int:
    """Return the channels of an image that kernels of GPUs read: whole words of 4 bytes if few."""
    return channels if channels >= FEW_CHANNELS else -(-channels // WORD) * WORD


def arranged_size(weight: Tensor, groups: int) -> int:
    """Return the elements of an arranged weight [O, C / groups, *window]."""
    shape = weight.shape
    if not is_in_panels(weight):
        channels = padded_channels(shape[1]) if len(shape) > 2 else shape[1]
        return shape[0] * channels * math.prod(shape[2:])
    if is_depthwise(shape, groups):
        return math.prod(shape)
    depth = math.prod(shape[1:])
    return groups * -(-(shape[0] // groups) // PANEL) * PANEL * (-(-depth // UNIT) * UNIT)


@op("int8_weight")
def int8_weight(weight: Tensor, groups: int) -> Tensor:
    """Return a weight arranged for the kernel.

    Args:
        weight: [O, C / groups, *window] in int8.
        groups: number of groups.

    Returns:
        Flat, in panels of 16 output channels: [groups, O / groups / 16, K / 4, 16, 4], where K
            counts taps, then channels, zero-padded; of depthwise convolutions [taps, O]. On a GPU
            [O, K], with few channels padded to `padded_channels`.
    """
    taps_last = weight.flatten(2) if weight.dim() > 2 else weight.unsqueeze(2)
    if not is_in_panels(weight):
        wider = padded_channels(weight.shape[1]) - weight.shape[1] if weight.dim() > 2 else 0
        return F.pad(taps_last.transpose(1, 2), (0, wider)).flatten()
    if is_depthwise(weight.shape, groups):
        return taps_last[:, 0].t().clone(memory_format=torch.contiguous_format).flatten()
    outs, depth = weight.shape[0] // groups, math.prod(weight.shape[1:])
    rows = taps_last.transpose(1, 2).reshape(groups, outs, depth)
    padded = F.pad(rows, (0, -depth % UNIT, 0, -outs % PANEL))
    panels = padded.view(groups, -1, PANEL, padded.shape[2] // 4, 4)
    return panels.transpose(2, 3).flatten()


@int8_weight.register_fake
def _(weight: Tensor, groups: int) -> Tensor:
    return weight.new_empty(arranged_size(weight, groups))


@op("int8_factors")
def int8_factors(
    x_scale: Tensor,
    x_zero_point: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_zero_point: Tensor | None,
    bias: Tensor | None,
    shift: int,
    groups: int,
    edges: list[int],
) -> Tensor:
    """Return what turns integer sums into values: a factor and an offset of each output channel.

    Args:
        x_scale: one element.
        x_zero_point: one element.
        weight: [O, C / groups, *window] in int8.
        weight_scale: [O], or one element.
        weight_zero_point: [O], or None if all are zero.
        bias: [O], or None.
        shift: 128 if the kernel adds it to signed activations, else 0.
        groups: number of groups.
        edges: of `edges_of`, for a kernel that pads with zeros; empty for one that pads with the
            zero point.

    Returns:
        [2, O] in fp32; [3, O] with the zero points of the weight as the last line. The kernel pads
            with the zero point of x, so a sum is too large by that times the sum of the weight;
            depthwise convolutions subtract it before. With `edges` [1 + classes, O]: from the third
            line on, what is added at pixels of each class behind the first, as `class_of_pixels`
            numbers them.
    """
    least = 0 if is_in_panels(weight) else -SHIFT
    if not least <= int(x_zero_point) + shift <= least + UNSIGNED:
        raise QuantizationError(
            "a zero point of an activation that its dtype holds",
            str(int(x_zero_point)),
            'Quantize with other zero points, or compile with options={"rules": "-int8"}.',
        )
    factors = (x_scale.double() * weight_scale.double()).expand(len(weight))
    offsets = factors.new_zeros(len(weight))
    if bias is not None:
        offsets = offsets + bias.double()
    if not is_depthwise(weight.shape, groups):
        totals = weight.flatten(1).sum(1, dtype=torch.int64)
        if weight_zero_point is not None:
            totals = totals - weight_zero_point * weight[0].numel()
        offsets = offsets - factors * totals * (x_zero_point + shift)
    if edges:
        missing = _sum_missing_taps(weight, edges) * x_zero_point
        return torch.cat([factors[None], offsets[None], factors * missing[1:]]).float()
    zeros = [] if weight_zero_point is None else [weight_zero_point.expand(len(weight))]
    return torch.stack([factors, offsets, *zeros]).float()


@fake(int8_factors)
def _(call: Arguments) -> object:
    lines = 2 if call.weight_zero_point is None else 3
    if call.edges:
        lines = 1 + math.prod(most + 1 for most in call.edges)
    return call.weight.new_empty(lines, call.weight.shape[0], dtype=torch.float32)


def _sum_missing_taps(weight: Tensor, edges: Sequence[int]) -> Tensor:
    """Return the sums of the taps of [O, C, h, w] outside of the image: [classes, O] in fp64."""
    taps, (height, width) = weight.sum(1, dtype=torch.int64).double(), weight.shape[2:]
    sums = []
    for above, below, before, after in itertools.product(*(range(most + 1) for most in edges)):
        inside = taps[:, above : max(height - below, above), before : max(width - after, before)]
        sums.append(taps.sum((1, 2)) - inside.sum((1, 2)))
    return torch.stack(sums)


@op("int8_row_factors")
def int8_row_factors(weight: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
    """Return factors, offsets and biases of a linear layer whose rows have scales of their own.

    Args:
        weight: [N, K] in int8.
        weight_scale: [N], or one element.
        bias: [N], or None.

    Returns:
        [3, N] in fp32, for activations in int8 with zero point 0, which kernels of CPUs read
            shifted by 128. The bias is added behind the scale of a row.
    """
    factors = weight_scale.double().expand(len(weight))
    shift = SHIFT if is_in_panels(weight) else 0
    offsets = -shift * factors * weight.sum(1, dtype=torch.int64)
    biases = factors.new_zeros(len(weight))
    if bias is not None:
        biases = biases + bias.double()
    return torch.stack([factors, offsets, biases]).float()


@fake(int8_row_factors)
def _(call: Arguments) -> object:
    return call.weight.new_empty(3, call.weight.shape[0], dtype=torch.float32)


@op("int8_scales")
def int8_scales(
    x_zero_point: Tensor,
    other_scale: Tensor | None,
    other_zero_point: Tensor | None,
    scale: Tensor | None,
    zero_point: Tensor | None,
    least: int,
    most: int,
) -> Tensor:
    """Return the scales of whole tensors, as the kernel reads them.

    Args:
        x_zero_point: one element.
        other_scale: one element, or None if the addend is no tensor of integers.
        other_zero_point: one element, or None.
        scale: the result's, one element; None if the result is not quantized.
        zero_point: the result's, one element, or None.
        least: the least integer of the result.
        most: the largest integer of the result.

    Returns:
        [7] in fp32: the zero point of x; scale and zero point of the addend; of the result the
            inverse of the scale, the zero point, and the least and largest distance from it.
    """
    own = _result_scales(scale, zero_point, least, most)
    return _join([x_zero_point, other_scale, other_zero_point, *own])


@fake(int8_scales)
def _(call: Arguments) -> object:
    return call.x_zero_point.new_empty(SCALES, dtype=torch.float32)


@op("int8_bmm_scales")
def int8_bmm_scales(
    a_scale: Tensor,
    a_zero_point: Tensor,
    b_scale: Tensor,
    b_zero_point: Tensor,
    scale: Tensor | None,
    zero_point: Tensor | None,
    least: int,
    most: int,
) -> Tensor:
    """Return the scales of a product of two activations, as the kernel reads them.

    Args:
        a_scale: one element.
        a_zero_point: one element.
        b_scale: one element.
        b_zero_point: one element.
        scale: the result's, one element; None if the result is not quantized.
        zero_point: the result's, one element, or None.
        least: the least integer of the result.
        most: the largest integer of the result.

    Returns:
        [8] in fp32: both scales, both zero points, and of the result what `int8_scales` returns.
    """
    own = _result_scales(scale, zero_point, least, most)
    return _join([a_scale, b_scale, a_zero_point, b_zero_point, *own])


@fake(int8_bmm_scales)
def _(call: Arguments) -> object:
    return call.a_scale.new_empty(SCALES + 1, dtype=torch.float32)


def _result_scales(
    scale: Tensor | None, zero_point: Tensor | None, least: int, most: int
) -> list[Any]:
    """Return the inverse scale of a result, its zero point, and its bounds from there."""
    shift = 0 if zero_point is None else zero_point
    return [1.0 if scale is None else 1.0 / scale.float(), shift, least - shift, most - shift]


def _join(numbers: list[Any]) -> Tensor:
    device = next(n.device for n in numbers if isinstance(n, Tensor))
    zeroed = (0.0 if n is None else n for n in numbers)
    return torch.stack([torch.as_tensor(n, device=device).float().reshape(()) for n in zeroed])


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


def split_padding(padding: Sequence[int], dims: int) -> tuple[Sequence[int], Sequence[int]]:
    """Return the padding at the begin and at the end of each dimension."""
    return padding[:dims], padding[-dims:]


def pad_sizes(padding: Sequence[int], dims: int) -> list[int]:
    """Return the padding as `torch.nn.functional.pad` takes it: the last dimension first."""
    pairs = zip(*split_padding(padding, dims), strict=True)
    return [size for pair in reversed([*pairs]) for size in pair]


def edges_of(
    image: Sequence[int],
    window: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> tuple[int, ...]:
    """Return the most taps outside of an image: above, below, before and after it.

    Args:
        image: size of the activation, [H, W].
        window: size of the kernel, [h, w].
        stride: of each dimension.
        padding: of each dimension.
        dilation: of each dimension.
    """
    axes = zip(
        image,
        sides(image, window, stride, padding, dilation),
        window,
        stride,
        padding,
        dilation,
        strict=True,
    )
    edges: list[int] = []
    for size, count, taps, step, pad, reach in axes:
        past = (count - 1) * step - pad + (taps - 1) * reach - (size - 1)
        edges += [min(taps, max(0, -(-outside // reach))) for outside in (pad, past)]
    return tuple(edges)


def class_of_pixels(
    image: Sequence[int],
    window: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """Return a number for each output pixel, [H', W'], by its taps outside of the image.

    Args:
        image: size of the activation, [H, W].
        window: size of the kernel, [h, w].
        stride: of each dimension.
        padding: of each dimension.
        dilation: of each dimension.
    """
    edges = edges_of(image, window, stride, padding, dilation)
    numbers = []
    for axis, count in enumerate(sides(image, window, stride, padding, dilation)):
        first = torch.arange(count) * stride[axis] - padding[axis]
        past = first + (window[axis] - 1) * dilation[axis] - (image[axis] - 1)
        most = edges[2 * axis : 2 * axis + 2]
        missing = [
            torch.clamp(
                (outside + dilation[axis] - 1).div(dilation[axis], rounding_mode="floor"), 0, end
            )
            for outside, end in zip((-first, past), most, strict=True)
        ]
        numbers.append(missing[0] * (most[1] + 1) + missing[1])
    return numbers[0][:, None] * ((edges[2] + 1) * (edges[3] + 1)) + numbers[1]


def plain_weight(arranged: Tensor, shape: Sequence[int], groups: int) -> Tensor:
    """Return a weight of shape [O, C / groups, *window], undoing `ipex::int8_weight`."""
    taps = math.prod(shape[2:])
    if not is_in_panels(arranged):
        rows = arranged.view(shape[0], taps, -1)[..., : shape[1]]
        return rows.transpose(1, 2).reshape(list(shape))
    if is_depthwise(shape, groups):
        return arranged.view(taps, shape[0]).t().reshape(list(shape))
    outs, depth = shape[0] // groups, shape[1] * taps
    padded = -(-depth // UNIT) * UNIT
    rows = arranged.view(groups, -1, padded // 4, PANEL, 4).transpose(2, 3)
    rows = rows.reshape(groups, -1, padded)[:, :outs, :depth]
    return rows.reshape(shape[0], taps, shape[1]).transpose(1, 2).reshape(list(shape))


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
