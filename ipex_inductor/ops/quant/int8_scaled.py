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
from ipex_inductor.ops.quant.int8 import (
    INTEGERS,
    apply_epilogue,
    class_of_pixels,
    padded_channels,
    quantize,
)

ipex = torch.ops.ipex
GEMMS = "gemm", "streamed"  # templates of GEMMs alone


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
    values = ipex.int8_scaled_gemm(rows, call.weight, call.factors, template, tile)
    if call.row_scales is not None:
        values = values * call.row_scales.reshape(-1, 1) + call.factors[2]
    result = _finish(values, call, lambda other: other.reshape(values.shape))
    return result.view(*call.x.shape[:-1], -1)


def compute_conv(template: str, tile: list[int], *args: Any) -> Tensor:
    """Compute `ipex::int8_conv` by a template; the torch ops behind it work on rows of pixels.

    Args:
        template: "conv", "boxes", "gemm" or "streamed", or empty.
        tile: fields of the template's tile, or an empty list.
        args: arguments of `ipex::int8_conv`.
    """
    call = name_arguments(ipex.int8_conv.default, args, {})
    geometry = call.window, call.stride, call.padding[:2], call.dilation
    operands = call.weight, call.factors
    wider = padded_channels(call.x.shape[1]) - call.x.shape[1]
    x = F.pad(call.x, (0, 0, 0, 0, 0, wider)) if wider else call.x
    if template in GEMMS or (not template and is_product(call)):
        values = ipex.int8_scaled_gemm(rows_of(x), *operands, template, tile)
    else:
        values = ipex.int8_scaled_conv(x, *operands, *geometry, template, tile)
    result = _finish(values, call, rows_of)
    return image_of(result, len(call.x), *sides(call.x.shape[2:], *geometry))


def is_product(call: Arguments) -> bool:
    """Return whether a convolution is a GEMM: 1x1 kernel, stride 1, no padding."""
    return {*call.window, *call.stride} == {1} and {*call.padding} == {0}


def compute_max_pool(*args: Any) -> Tensor:
    """Compute `ipex::int8_max_pool` in fp16, which has every 8-bit integer."""
    call = name_arguments(ipex.int8_max_pool.default, args, {})
    window = call.window, call.stride, call.padding, call.dilation, call.ceil_mode
    return F.max_pool2d(call.x.half(), *window).to(call.x.dtype)


def _finish(values: Tensor, call: Arguments, arrange: Any) -> Tensor:
    """Return the epilogue and quantization of a product's values.

    Integers are held in memory. Else Inductor might compute them again in each loop that reads
    them, from values in fp32.

    Args:
        values: [M, N] in fp32.
        call: arguments of the product.
        arrange: returns an addend as rows.
    """
    other = None if call.other is None else arrange(call.other)
    result = apply_epilogue(values, call.scales, other, (call.binary, call.unary, call.scalars))
    result = quantize(result, call.scales, call.dtype)
    if result.dtype in INTEGERS:
        result = inductor_prims.force_stride_order(result, list(result.stride()))
    return result


# Bodies of ops on a GPU where nothing is recorded.
BODIES: dict[Any, Callable[..., Tensor]] = {
    ipex.int8_conv.default: partial(compute_conv, "", []),
    ipex.int8_linear.default: partial(compute_linear, "", []),
    ipex.int8_max_pool.default: compute_max_pool,
}
