"""Products of 8-bit integers on a GPU: a kernel for sums and factors, and torch ops behind it.

`ipex::int8_scaled_gemm` and `ipex::int8_scaled_conv` are lowered to templates, into which Inductor
fuses the epilogue and the quantization of the result. The weight lies as `ipex::int8_weight` leaves
it on a GPU, [O, taps * C].
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor import inductor_prims

from ipex_inductor.ops.common.defining import Arguments, fake, name_arguments, op
from ipex_inductor.ops.conv.geometry import image_of, rows_of, sides
from ipex_inductor.ops.pointwise.gelu import SHORT
from ipex_inductor.ops.quant.int8 import apply_epilogue
from ipex_inductor.ops.quant.int8_borders import class_of_pixels
from ipex_inductor.ops.quant.int8_operands import INTEGERS, WORD, padded_channels

ipex = torch.ops.ipex
STRIDE = 2  # that is folded into channels
GEMMS = "gemm", "streamed"  # templates of GEMMs alone
# Epilogues (binary, unary) through which the scale of a result may be moved.
FOLDED = (("none", "none"), ("none", "relu"), ("add", "none"), ("add", "relu"))
MAGIC = 12582912.0  # 1.5 * 2^23, as an integer 0x4B400000
Finish = Callable[[Tensor], Tensor]
Added = tuple[Tensor | None, Tensor | None]
NOTHING: Added = (None, None)


@op("int8_scaled_gemm")
def int8_scaled_gemm(
    x: Tensor,
    rows: Tensor,
    factors: Tensor,
    other: Tensor | None,
    scale: Tensor | None,
    template: str,
    tile: list[int],
) -> Tensor:
    """Return `x @ w.T * factors[0] + factors[1] + other * scale` of integers.

    Args:
        x: [M, K] in int8.
        rows: the weight [N, K] in int8, flat.
        factors: [2, N] or more lines, of `ipex::int8_factors` or `ipex::int8_row_factors`.
        other: [M, N] in int8 or uint8, or None.
        scale: of `other`, one element.
        template: "gemm", "streamed" or "conv"; empty for one that the lowering takes by the sizes.
        tile: fields of the template's tile; empty for one that the lowering takes by the sizes.

    Returns:
        [M, N] in fp32.
    """
    sums = x.double() @ rows.view(factors.shape[1], x.shape[1]).double().t()
    values = sums * factors[0].double() + factors[1].double()
    return _add_integers(values, other, scale).float()


def _add_integers(values: Tensor, other: Tensor | None, scale: Tensor | None) -> Tensor:
    if other is None or scale is None:
        return values
    return values + other.double() * scale.double()


@fake(int8_scaled_gemm)
def _(call: Arguments) -> object:
    return call.factors.new_empty(call.x.shape[0], call.factors.shape[1])


@op("int8_scaled_conv")
def int8_scaled_conv(
    x: Tensor,
    rows: Tensor,
    factors: Tensor,
    other: Tensor | None,
    scale: Tensor | None,
    window: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    template: str,
    tile: list[int],
) -> Tensor:
    """Return `conv2d(x, w) * factor + offset + other * scale` of integers, as rows of pixels.

    The image is padded with zeros.

    Args:
        x: [B, C, H, W] in int8, channels-last.
        rows: the weight [O, h * w * C] in int8, flat.
        factors: [1 + classes, O] of `ipex::int8_factors`: factors, offsets, and what is added at
            pixels of each class behind the first.
        other: [B * H' * W', O] in int8 or uint8, or None.
        scale: of `other`, one element.
        window: [h, w] of the kernel.
        stride: of each dimension.
        padding: of each dimension.
        dilation: of each dimension.
        template: "conv" or "boxes"; empty for one that the lowering takes by the sizes.
        tile: fields of the template's tile; empty for one that the lowering takes by the sizes.

    Returns:
        [B * H' * W', O] in fp32.
    """
    geometry = window, stride, padding, dilation
    weight = rows.view(factors.shape[1], *window, x.shape[1]).permute(0, 3, 1, 2)
    sums = rows_of(F.conv2d(x.double(), weight.double(), None, stride, padding, dilation))
    classes = class_of_pixels(x.shape[2:], *geometry).to(x.device).flatten().repeat(len(x))
    more = torch.where((classes > 0)[:, None], factors[1 + classes], 0.0)
    values = sums * factors[0].double() + factors[1].double() + more.double()
    return _add_integers(values, other, scale).float()


@fake(int8_scaled_conv)
def _(call: Arguments) -> object:
    geometry = call.window, call.stride, call.padding, call.dilation
    height, width = sides(call.x.shape[2:], *geometry)
    return call.factors.new_empty(call.x.shape[0] * height * width, call.factors.shape[1])


def compute_linear(template: str, tile: list[int], *args: Any) -> Tensor:
    """Compute `ipex::int8_linear` by a template; the torch ops behind it work on a matrix.

    Args:
        template: "gemm", "streamed", "conv", or empty.
        tile: fields of the template's tile, or an empty list.
        args: arguments of `ipex::int8_linear`.
    """
    call = name_arguments(ipex.int8_linear.default, args, {})
    rows = call.x.reshape(-1, call.x.shape[-1])
    other = None if call.other is None else call.other.reshape(-1, call.other.shape[-1])
    factors, added, finish = _fold_scales(call, other)
    values = ipex.int8_scaled_gemm(rows, call.weight, factors, *added, template, tile)
    if call.row_scales is not None:
        values = values * call.row_scales.reshape(-1, 1) + call.factors[2]
    return finish(values).view(*call.x.shape[:-1], -1)


def compute_conv(template: str, tile: list[int], *args: Any) -> Tensor:
    """Compute `ipex::int8_conv` by a template; the torch ops behind it work on rows of pixels.

    Args:
        template: "conv", "boxes", "gemm" or "streamed", or empty.
        tile: fields of the template's tile, or an empty list.
        args: arguments of `ipex::int8_conv`.
    """
    call = name_arguments(ipex.int8_conv.default, args, {})
    geometry = call.window, call.stride, call.padding[:2], call.dilation
    size = len(call.x), *sides(call.x.shape[2:], *geometry)
    other = None if call.other is None else rows_of(call.other)
    factors, added, finish = _fold_scales(call, other)
    operands = call.weight, factors
    wider = padded_channels(call.x.shape[1]) - call.x.shape[1]
    x = F.pad(call.x, (0, 0, 0, 0, 0, wider)) if wider else call.x
    if may_fold_stride(call.x.shape[1], call.window, call.stride, call.dilation):
        x, weight, window = _fold_stride(x, call)
        operands, geometry = (weight, factors[:2]), (window, [1, 1], [0, 0], [1, 1])
    if template in GEMMS or (not template and is_product(call)):
        values = ipex.int8_scaled_gemm(rows_of(x), *operands, *added, template, tile)
    else:
        values = ipex.int8_scaled_conv(x, *operands, *added, *geometry, template, tile)
    return image_of(finish(values), *size)


def may_fold_stride(
    channels: int, window: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> bool:
    """Return whether a convolution strides over pixels of so few channels that they are joined.

    Args:
        channels: of the image.
        window: size of the kernel.
        stride: of each dimension.
        dilation: of each dimension.
    """
    few = channels <= WORD and {*stride} == {STRIDE} and {*dilation} == {1}
    return few and min(window) > STRIDE


def folded_window(window: Sequence[int], padding: Sequence[int]) -> list[int]:
    """Return the size of a kernel [h, w] over pixels that are joined by twos."""
    pairs = zip(window, padding, strict=True)
    return [-(-(taps + pad % STRIDE) // STRIDE) for taps, pad in pairs]


def _fold_stride(x: Tensor, call: Arguments) -> tuple[Tensor, Tensor, list[int]]:
    """Return an image whose channels are those of 2 x 2 pixels, and the weight that fits it.

    A convolution with stride 2 is one with stride 1 on that image, of 16 channels: whole vectors
    are read in place of single words. The image is padded with the zero point.

    Args:
        x: [B, 4, H, W] in int8.
        call: arguments of `ipex::int8_conv`.

    Returns:
        [B, 16, H', W'], the weight [O, h' * w' * 16], flat, and [h', w'].
    """
    batch, channels, *image = x.shape
    front = [pad + pad % STRIDE for pad in call.padding[:2]]
    window = folded_window(call.window, call.padding[:2])
    geometry = call.window, call.stride, call.padding[:2], call.dilation
    blocks = [n + taps - 1 for n, taps in zip(sides(image, *geometry), window, strict=True)]
    behind = [
        STRIDE * n - before - size for n, before, size in zip(blocks, front, image, strict=True)
    ]
    around = (front[1], behind[1], front[0], behind[0])
    inside = F.pad(x.new_ones(1, 1, *image, dtype=torch.bool), around)
    padded = torch.where(inside, F.pad(x, around), call.scales[0].to(x.dtype))
    split = padded.view(batch, channels, blocks[0], STRIDE, blocks[1], STRIDE)
    joined = split.permute(0, 2, 4, 3, 5, 1).reshape(batch, *blocks, -1).permute(0, 3, 1, 2)
    weight = call.weight.view(-1, *call.window, channels)
    before = [pad % STRIDE for pad in call.padding[:2]]
    rest = [
        STRIDE * n - taps - first
        for n, taps, first in zip(window, call.window, before, strict=True)
    ]
    whole = F.pad(weight, (0, 0, before[1], rest[1], before[0], rest[0]))
    parts = whole.view(len(whole), window[0], STRIDE, window[1], STRIDE, channels)
    return joined, parts.permute(0, 1, 3, 2, 4, 5).reshape(-1), window


def is_product(call: Arguments) -> bool:
    """Return whether a convolution is a GEMM: 1x1 kernel, stride 1, no padding."""
    return {*call.window, *call.stride} == {1} and {*call.padding} == {0}


def compute_max_pool(*args: Any) -> Tensor:
    """Compute `ipex::int8_max_pool` in fp16, which has every 8-bit integer."""
    call = name_arguments(ipex.int8_max_pool.default, args, {})
    window = call.window, call.stride, call.padding, call.dilation, call.ceil_mode
    return F.max_pool2d(call.x.half(), *window).to(call.x.dtype)


def _fold_scales(call: Arguments, other: Tensor | None) -> tuple[Tensor, Added, Finish]:
    """Return factors, addend and scale of a product, and its epilogue as a function of its values.

    A result in integers behind a sum and a ReLU needs no multiplication: its scale is part of the
    factors, its zero point and that of an integer addend part of an offset. The kernel reads an
    integer addend by itself: Inductor might fuse the sum into the kernel that makes the addend.

    Args:
        call: arguments of the product.
        other: the addend as rows, or None.
    """
    scales, words = call.scales, (call.binary, call.unary, call.scalars)

    def apply(values: Tensor) -> Tensor:
        if call.unary not in SHORT or call.dtype == torch.float32:
            return apply_epilogue(values, scales, other, words)
        return SHORT[call.unary](apply_epilogue(values, scales, other, (call.binary, "none", [])))

    if call.dtype not in INTEGERS:
        return call.factors, NOTHING, lambda values: apply(values).to(call.dtype)
    if words[:2] not in FOLDED or getattr(call, "row_scales", None) is not None:

        def finish_apart(values: Tensor) -> Tensor:
            return _round(apply(values) * scales[3], call, scales[5])

        return call.factors, NOTHING, finish_apart
    factors, added = call.factors * scales[3], NOTHING
    if other is not None and other.dtype in INTEGERS:
        other_scale = scales[1] * scales[3]
        added, offset = (other, other_scale), factors[1:2] - scales[2] * other_scale
        factors, other = torch.cat([factors[:1], offset, factors[2:]]), None
    least = scales[5].clamp_min(0.0) if call.unary == "relu" else scales[5]

    def finish(values: Tensor) -> Tensor:
        return _round(values if other is None else values + other.float() * scales[3], call, least)

    return factors, added, finish


def _round(steps: Tensor, call: Arguments, least: Tensor) -> Tensor:
    """Return steps as integers of a result, which are held in memory.

    Behind an addition of 1.5 * 2^23 the last bits of a float are the rounded integer. The result is
    stored. Otherwise Inductor might compute it again, from stored fp32 values, in each loop that
    reads it.

    Args:
        steps: values in units of the result's scale.
        call: arguments of the product.
        least: the least step.
    """
    rounded = (steps.clamp_min(least).clamp_max(call.scales[6]) + MAGIC).view(torch.int32)
    result = (rounded + call.scales[4].int()).to(call.dtype)
    held: Tensor = inductor_prims.force_stride_order(result, list(result.stride()))
    return held


# Bodies of ops on a GPU where nothing is recorded.
BODIES: dict[Any, Callable[..., Tensor]] = {
    ipex.int8_conv.default: partial(compute_conv, "", []),
    ipex.int8_linear.default: partial(compute_linear, "", []),
    ipex.int8_max_pool.default: compute_max_pool,
}
