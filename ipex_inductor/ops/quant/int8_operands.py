"""Operands of kernels on 8-bit integers that are made ahead: weights, factors and scales."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ipex_inductor.errors import QuantizationError
from ipex_inductor.ops.common.defining import Arguments, fake, op

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
