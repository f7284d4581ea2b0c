"""Round tensors to 8 bits and back, by torch's `quantized_decomposed` operators.

While `torch.jit.trace` runs the same arithmetic is done by plain operators of torch, so that the
file of a traced model needs nothing but torch, in C++ too.
"""

from typing import Any

import torch
from torch import Tensor

from ipex_inductor import compat
from ipex_inductor.ops.quant import fp8, fp8_steps
from ipex_inductor.quantization.scheme import MIN_SCALE

BYTES = (-128, 127, torch.int8)

compat.quantized_ops()  # registers them, which Dynamo could not trace
quantized_decomposed: Any = torch.ops.quantized_decomposed


def round_rows(x: Tensor) -> Tensor:
    """Return `x` rounded to symmetric int8, with a scale for each row (the last dimension)."""
    scale = (x.abs().amax(-1, keepdim=True).float() / 127).clamp_min(MIN_SCALE)
    zeros = torch.zeros_like(scale, dtype=torch.int32)
    if _is_traced():
        return _round(x, scale, zeros, *BYTES).to(x.dtype)
    quantized = quantized_decomposed.quantize_per_token(x, scale, zeros, *BYTES)
    result: Tensor = quantized_decomposed.dequantize_per_token(
        quantized, scale, zeros, *BYTES, x.dtype
    )
    return result


def round_weight(weight: Tensor, per_channel: bool = True) -> Tensor:
    """Return a weight rounded to symmetric int8, with a scale for each of its first dimension."""
    sizes = list(range(1 if per_channel else 0, weight.dim()))
    scale = (weight.abs().amax(sizes).float() / 127.5).clamp_min(MIN_SCALE)
    scale = scale if per_channel else scale.expand(weight.shape[0])
    zeros = torch.zeros_like(scale, dtype=torch.int64)
    if _is_traced():
        shape = [-1] + [1] * (weight.dim() - 1)
        return _round(weight, scale.view(shape), zeros.view(shape), *BYTES).to(weight.dtype)
    quantized = quantized_decomposed.quantize_per_channel(weight, scale, zeros, 0, *BYTES)
    result: Tensor = quantized_decomposed.dequantize_per_channel(quantized, scale, zeros, 0, *BYTES)
    return result.to(weight.dtype)


def multiply_in_fp8(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the output of a linear layer whose rows of input and weight are rounded to E4M3.

    Args:
        input: [..., K].
        weight: [N, K].
        bias: [N], or None.
    """
    kind = input.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype
    rows, row_scales = fp8.fp8_quantize_rows(input.reshape(-1, weight.shape[1]))
    channels, channel_scales = fp8.fp8_quantize_rows(weight)
    result: Tensor = fp8.fp8_gemm_rows(rows, channels, row_scales, channel_scales, bias, dtype)
    return result.view(*input.shape[:-1], weight.shape[0])


def multiply_by_fp8_weight(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the output of a linear layer whose weight is rounded to E4M3.

    Args:
        input: [..., K], which is not rounded.
        weight: [N, K].
        bias: [N], or None.
    """
    values, steps = fp8_steps.fp8_quantize_channels(weight)
    exact = fp8_steps.fp8_dequantize(values, steps, weight.dtype)
    result: Tensor = torch.ops.aten.linear.default(input, exact, bias)
    return result


def _round(
    x: Tensor, scale: Tensor, zero_point: Tensor, low: int, high: int, dtype: torch.dtype
) -> Tensor:
    """Return `x` rounded and back again, by the arithmetic of torch's operators.

    Args:
        x: the tensor.
        scale: one step, of a shape that broadcasts.
        zero_point: the quantized value of zero.
        low: the smallest quantized value.
        high: the largest quantized value.
        dtype: the type of quantized values.
    """
    quantized = quantize_plainly(x, scale, zero_point, low, high, dtype)
    return dequantize_plainly(quantized, scale, zero_point)


def _is_traced() -> bool:
    """Return whether `torch.jit.trace` runs."""
    tracing: Any = torch.jit
    return bool(tracing.is_tracing())


def quantize_plainly(
    x: Tensor, scale: Tensor, zero_point: Tensor, low: int, high: int, dtype: torch.dtype
) -> Tensor:
    """Return `x` quantized by plain operators, bit for bit as `quantized_decomposed` does it.

    Args:
        x: the tensor.
        scale: one step, of a shape that broadcasts.
        zero_point: the quantized value of zero.
        low: the smallest quantized value.
        high: the largest quantized value.
        dtype: the type of quantized values.
    """
    steps = torch.round(x.float() * (1.0 / scale)) + zero_point
    return torch.clamp(steps, low, high).to(dtype)


def dequantize_plainly(quantized: Tensor, scale: Tensor, zero_point: Tensor, *_: Any) -> Tensor:
    """Return the values that a quantized tensor stands for, by plain operators."""
    return (quantized.float() - zero_point) * scale
