"""Products of 8-bit integers on a GPU: a kernel for sums and factors, and torch ops behind it.

`ipex::int8_scaled_gemm` and `ipex::int8_scaled_conv` are lowered to templates, into which Inductor
fuses the epilogue and the quantization of the result. The weight lies as `ipex::int8_weight` leaves
it on a GPU, [O, taps * C].
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor import inductor_prims

from ipex_inductor.ops.common.defining import Arguments, fake, name_arguments, op
from ipex_inductor.ops.conv.geometry import image_of, rows_of, sides
from ipex_inductor.ops.pointwise import gelu
from ipex_inductor.ops.quant.int8 import (
    INTEGERS,
    apply_epilogue,
    class_of_pixels,
    padded_channels,
)

ipex = torch.ops.ipex
GEMMS = "gemm", "streamed"  # templates of GEMMs alone
# Epilogues (binary, unary) through which the scale of a result may be moved.
FOLDED = (("none", "none"), ("none", "relu"), ("add", "none"), ("add", "relu"))
# Short forms of activations, equal to the full ones in results of 16 bits.
SHORT = {"gelu": gelu.gelu, "gelu_tanh": gelu.gelu_tanh}
MAGIC, BITS = (
    12582912.0,
    0x4B400000,
)  # 1.5 * 2^23, whose last byte is 0, as a float and as an integer
Finish = Callable[[Tensor], Tensor]


@op("int8_scaled_gemm")
def int8_scaled_gemm(
    x: Tensor, rows: Tensor, factors: Tensor, template: str, tile: list[int]
) -> Tensor:
    """Return `x @ w.T * factors[0] + factors[1]` of integers.

    Args:
        x: [M, K] in int8.
        rows: the weight [N, K] in int8, flat.
        factors: [2, N] or more lines, of `ipex::int8_factors` or `ipex::int8_row_factors`.
        template: "gemm", "streamed" or "conv"; empty for one that the lowering takes by the sizes.
        tile: fields of the template's tile; empty for one that the lowering takes by the sizes.

    Returns:
        [M, N] in fp32.
    """
    sums = x.double() @ rows.view(factors.shape[1], x.shape[1]).double().t()
    return (sums * factors[0].double() + factors[1].double()).float()


@fake(int8_scaled_gemm)
def _(call: Arguments) -> object:
    return call.factors.new_empty(call.x.shape[0], call.factors.shape[1])


@op("int8_scaled_conv")
def int8_scaled_conv(
    x: Tensor,
    rows: Tensor,
    factors: Tensor,
    window: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    template: str,
    tile: list[int],
) -> Tensor:
    """Return `conv2d(x, w) * factor + offset` of integers, padded with zeros, as rows of pixels.

    Args:
        x: [B, C, H, W] in int8, channels-last.
        rows: the weight [O, h * w * C] in int8, flat.
        factors: [1 + classes, O] of `ipex::int8_factors`: factors, offsets, and what is added at
            pixels of each class behind the first.
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
    return (sums * factors[0].double() + factors[1].double() + more.double()).float()


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
    factors, finish = _fold_scales(call, other)
    values = ipex.int8_scaled_gemm(rows, call.weight, factors, template, tile)
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
    factors, finish = _fold_scales(call, None if call.other is None else rows_of(call.other))
    operands = call.weight, factors
    wider = padded_channels(call.x.shape[1]) - call.x.shape[1]
    x = F.pad(call.x, (0, 0, 0, 0, 0, wider)) if wider else call.x
    if template in GEMMS or (not template and is_product(call)):
        values = ipex.int8_scaled_gemm(rows_of(x), *operands, template, tile)
    else:
        values = ipex.int8_scaled_conv(x, *operands, *geometry, template, tile)
    return image_of(finish(values), len(call.x), *sides(call.x.shape[2:], *geometry))


def is_product(call: Arguments) -> bool:
    """Return whether a convolution is a GEMM: 1x1 kernel, stride 1, no padding."""
    return {*call.window, *call.stride} == {1} and {*call.padding} == {0}


def compute_max_pool(*args: Any) -> Tensor:
    """Compute `ipex::int8_max_pool` in fp16, which has every 8-bit integer."""
    call = name_arguments(ipex.int8_max_pool.default, args, {})
    window = call.window, call.stride, call.padding, call.dilation, call.ceil_mode
    return F.max_pool2d(call.x.half(), *window).to(call.x.dtype)


def _fold_scales(call: Arguments, other: Tensor | None) -> tuple[Tensor, Finish]:
    """Return the factors of a product, and its epilogue as a function of its values.

    A result in integers behind a sum and a ReLU needs no multiplication: its scale is part of the
    factors, its zero point and that of an integer addend part of an offset.

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
        return call.factors, lambda values: apply(values).to(call.dtype)
    if words[:2] not in FOLDED or getattr(call, "row_scales", None) is not None:
        return call.factors, lambda values: _round(apply(values) * scales[3], call, scales[5])
    factors, offset = call.factors * scales[3], 0
    if other is not None and other.dtype in INTEGERS:
        other_scale = scales[1] * scales[3]
        offset = scales[2] * other_scale
        other = ((other.int() + BITS).view(torch.float32) - MAGIC) * other_scale
    elif other is not None:
        other = other.float() * scales[3]
    factors = torch.cat([factors[:1], factors[1:2] - offset, factors[2:]])
    least = scales[5].clamp_min(0.0) if call.unary == "relu" else scales[5]
    return factors, lambda values: _round(values if other is None else values + other, call, least)


def _round(steps: Tensor, call: Arguments, least: Tensor) -> Tensor:
    """Return steps as integers of a result, which are held in memory.

    Behind an addition of 1.5 * 2^23 the last bits of a float are the rounded integer. Integers that
    are not held Inductor might compute again in each loop that reads them, from values in fp32.

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
