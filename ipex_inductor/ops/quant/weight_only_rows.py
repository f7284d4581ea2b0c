"""`ipex::weight_only_rows`: a GEMM on a quantized weight as Triton's template computes it.

`compute` writes `ipex::weight_only_linear` by it. Scales and zero points are laid out for the
kernel by `ipex::weight_only_factors`, which reads weights alone. Bias and rounding follow in
torch's ops.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ipex_inductor.ops.common.defining import Arguments, fake, name_arguments, op
from ipex_inductor.ops.quant.weight_only import (
    COMPUTES,
    Scheme,
    dequantize_weight,
    expand_groups,
    quantize_activations,
)

LINEAR = torch.ops.ipex.weight_only_linear.default
HALF_BITS = 0xFFFF
MOST_ROWS = 128
# What a float adds to an integer in its last bits, see `templates/weight_only_ptx.py`.
BASES = {
    ("int4", torch.bfloat16): 128,
    ("int4", torch.float16): 1024,
    ("int8", torch.float16): 1024 + 128,
}


@op("weight_only_factors")
def weight_only_factors(
    scales: Tensor, zeros: Tensor | None, weight_dtype: str, dtype: torch.dtype
) -> Tensor:
    """Return scales and zero points as the kernel reads them, in words.

    A word has the bits of a scale, and above them those of `-(zero + base)` in `dtype`, with a base
    of `BASES`. Scales in fp32 have words of their own, in front of the words of these offsets in
    fp32.

    Args:
        scales: [N, groups] in fp32, fp16 or bf16.
        zeros: [N, groups], or None.
        weight_dtype: of the scheme.
        dtype: of the activations.

    Returns:
        [groups, N] in int32, or [2 * groups, N] of scales in fp32 with zero points.
    """
    return lay_out_factors(scales, zeros, weight_dtype, dtype)


@fake(weight_only_factors)
def _(call: Arguments) -> object:
    columns, groups = call.scales.shape
    is_wide = call.scales.dtype == torch.float32 and call.zeros is not None
    return call.scales.new_empty((groups * (1 + is_wide), columns), dtype=torch.int32)


def lay_out_factors(
    scales: Tensor, zeros: Tensor | None, weight_dtype: str, dtype: torch.dtype
) -> Tensor:
    """Return `ipex::weight_only_factors` in torch's ops.

    Args:
        scales: [N, groups].
        zeros: [N, groups], or None.
        weight_dtype: of the scheme.
        dtype: of the activations.
    """
    by_group, offsets = scales.t(), None
    if zeros is not None:
        offsets = -(zeros.t().float() + BASES.get((weight_dtype, dtype), 0))
    if scales.dtype == torch.float32:
        words = by_group if offsets is None else torch.cat([by_group, offsets])
        return words.clone(memory_format=torch.contiguous_format).view(torch.int32)
    words = by_group.contiguous().view(torch.int16).to(torch.int32) & HALF_BITS
    if offsets is None:
        return words
    return words | offsets.to(dtype).contiguous().view(torch.int16).to(torch.int32) << 16


def read_factors(
    factors: Tensor, scheme: Scheme, dtype: torch.dtype, scale_dtype: torch.dtype, zeroed: bool
) -> tuple[Tensor, Tensor | None]:
    """Return scales and zero points, [N, groups] in fp32, from `ipex::weight_only_factors`.

    Args:
        factors: the words.
        scheme: of the weight.
        dtype: of the activations.
        scale_dtype: of the scales.
        zeroed: whether there are zero points.
    """
    if scale_dtype == torch.float32:
        scales, *offsets = factors.view(torch.float32).chunk(1 + zeroed)
    else:
        halves = factors.view(torch.int16).view(*factors.shape, 2)
        scales = halves[..., 0].contiguous().view(scale_dtype).float()
        offsets = [halves[..., 1].contiguous().view(dtype).float()] if zeroed else []
    base = BASES.get((scheme.weight_dtype, dtype), 0)
    return scales.t(), (-offsets[0] - base).t() if zeroed else None


@op("weight_only_rows")
def weight_only_rows(
    x: Tensor,
    weight: Tensor,
    factors: Tensor,
    x_scales: Tensor | None,
    weight_dtype: str,
    group_size: int,
    scale_dtype: torch.dtype,
    zeroed: bool,
    tile: list[int],
) -> Tensor:
    """Return `x @ W.T` for a weight W that is stored quantized, not rounded.

    Args:
        x: [M, K] in bf16 or fp16.
        weight: as `ipex::weight_only_linear` has it.
        factors: of `ipex::weight_only_factors`.
        x_scales: [M, groups] in fp32, by which x is multiplied; or None.
        weight_dtype: "int8", "int4", "nf4" or "fp8".
        group_size: elements along K that share a scale.
        scale_dtype: dtype of the scales.
        zeroed: whether there are zero points.
        tile: fields of the template's tile; empty for one that the lowering takes by the sizes.

    Returns:
        [M, N] in fp32.
    """
    scheme = Scheme(weight_dtype, group_size, "float32")
    scales, zeros = read_factors(factors, scheme, x.dtype, scale_dtype, zeroed)
    depth, values = x.shape[1], x.float()
    if x_scales is not None:
        values = values * expand_groups(x_scales, group_size, depth)
    return values @ dequantize_weight(weight, scales, zeros, scheme, depth).t()


@fake(weight_only_rows)
def _(call: Arguments) -> object:
    return call.x.new_empty((call.x.shape[0], call.weight.shape[0]), dtype=torch.float32)


def compute(tile: Sequence[int], *args: Any) -> Tensor:
    """Compute `ipex::weight_only_linear` by the kernel; the bias is added in fp32.

    Args:
        tile: fields of the template's tile; empty for one that is taken by the sizes.
        args: arguments of `ipex::weight_only_linear`.
    """
    call = name_arguments(LINEAR, args, {})
    dtype, depth = COMPUTES[call.compute], call.x.shape[-1]
    rows, x_scales = call.x.reshape(-1, depth), None
    if call.order is not None:
        rows = rows.index_select(-1, call.order)
    if dtype == torch.int8:  # integers of up to 127, which bf16 has exactly
        rows, x_scales = quantize_activations(rows, call.group_size)
        dtype = torch.bfloat16
    rows = rows.to(dtype)
    ipex = torch.ops.ipex
    factors = ipex.weight_only_factors(call.scales, call.zeros, call.weight_dtype, dtype)
    given = call.scales.dtype, call.zeros is not None, [int(n) for n in tile]
    scheme = call.weight_dtype, call.group_size
    operands = rows, call.weight, factors, x_scales
    sums: Tensor = ipex.weight_only_rows(*operands, *scheme, *given)
    if call.bias is not None:
        sums = sums + call.bias.float()
    return sums.to(call.x.dtype).view(*call.x.shape[:-1], sums.shape[-1])


def compute_by_size(*args: Any) -> Tensor:
    """Compute `ipex::weight_only_linear` by the kernel, or for many rows by `dequantize`."""
    x = name_arguments(LINEAR, args, {}).x
    return dequantize(*args) if has_many_rows(x) else compute([], *args)


def has_many_rows(x: Tensor) -> bool:
    """Return whether activations have so many rows that `dequantize` is expected to be faster."""
    return math.prod(x.shape[:-1]) > MOST_ROWS


def compute_exactly(*args: Any) -> Tensor:
    """Compute `ipex::weight_only_linear` in fp64, without the roundings of its scheme.

    Args:
        args: arguments of the op, those in floating point as fp64. FP8 numbers too are in fp64.
    """
    call = name_arguments(LINEAR, args, {})
    values = call.x if call.order is None else call.x.index_select(-1, call.order)
    scheme = Scheme(call.weight_dtype, call.group_size, call.compute)
    tensors = call.weight, call.scales, call.zeros
    plain = dequantize_weight(*tensors, scheme, values.shape[-1]).double()
    return F.linear(values, plain, call.bias)


def dequantize(*args: Any) -> Tensor:
    """Compute `ipex::weight_only_linear` by a library's GEMM on the dequantized weight."""
    result: Tensor = LINEAR(*args)
    return result
