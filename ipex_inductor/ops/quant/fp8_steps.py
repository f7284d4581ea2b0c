"""FP8 inference: activations with one step, weights with a step for each output channel.

A step is what 1 in FP8 stands for. Steps are powers of two, as those of IPEX. So a dequantized
number is exact in fp32 and in bf16, and sums of scaled numbers round as scaled sums do: kernels
that scale before, within or behind a GEMM give the same bits if they add in the same order.
"""

from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from ipex_inductor.errors import QuantizationError
from ipex_inductor.ops.common.defining import op
from ipex_inductor.ops.quant import fp8

E4M3 = torch.float8_e4m3fn
LARGEST = float(torch.finfo(E4M3).max)
# Of channels of zeros. Times the smallest step of an activation, 2^-40, it is a normal number.
SMALLEST_STEP = 2.0**-80
BLOCK = 1 << 18  # elements of a weight that are dequantized at once: they stay in the second cache

_ONLY = "FP8 is for linear layers"
LIMITS = {
    "activations": f"{_ONLY}: products of two activations have no FP8 kernel",
    "embedding bag": f"{_ONLY}: embedding bags have no FP8 kernel",
    "convolution": f"{_ONLY}: convolutions have no FP8 kernel",
    "no matrix": f"{_ONLY}: its weight is no matrix",
    "factors": f"{_ONLY}: addmm with alpha or beta has no FP8 kernel",
    "recurrent": _ONLY,
    "operands": "it reads dequantized operands: its addend is no bias vector, or a cast rounds the "
    "operands (fp16 holds not all of them)",
}
"""Why a layer has no kernel in FP8: of a recipe, before layers are rounded, and of a graph."""


def round_up_to_power(x: Tensor) -> Tensor:
    """Return the least powers of two that are not below normal positive numbers in fp32.

    Infinity and NaN become NaN.
    """
    # TorchScript has no views of bits, and its division is exact.
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        mantissa = torch.frexp(x).mantissa
        return torch.where(mantissa == 0.5, x, x / mantissa)
    bits = (x.view(torch.int32) + 0x7FFFFF) & 0x7F800000  # generated code may divide inexactly
    return torch.where(x.isfinite(), bits.view(torch.float32), torch.nan)


def compute_step(amax: Tensor) -> Tensor:
    """Return the steps by which tensors or channels with these largest magnitudes fit E4M3.

    Args:
        amax: of any shape in fp32.
    """
    return round_up_to_power((amax / LARGEST).clamp_min(SMALLEST_STEP))


def quantize_tensor(x: Tensor, step: Tensor) -> Tensor:
    """Return `ipex::fp8_quantize_tensor` in ops that Inductor fuses."""
    return (x.float() * step.reciprocal()).clamp(-LARGEST, LARGEST).to(E4M3)


def dequantize(values: Tensor, step: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `ipex::fp8_dequantize` in ops that Inductor fuses."""
    return (values.float() * step).to(dtype)


@op("fp8_quantize_tensor")
def fp8_quantize_tensor(x: Tensor, step: Tensor) -> Tensor:
    """Return x in E4M3, rounded to even and saturated; NaN stays NaN.

    Args:
        x: floating point of any shape.
        step: one element in fp32.
    """
    return quantize_tensor(x, step).contiguous()


@fp8_quantize_tensor.register_fake
def _(x: Tensor, step: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=E4M3, device=x.device)


def quantize_channels(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return `ipex::fp8_quantize_channels` in plain ops of torch."""
    exact = weight.float()
    step = compute_step(exact.abs().amax(1, keepdim=True))
    return quantize_tensor(exact, step).contiguous(), step


@op("fp8_quantize_channels")
def fp8_quantize_channels(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return a weight in E4M3, each output channel with a step of its own, and the steps.

    Args:
        weight: [N, K] in floating point.

    Returns:
        [N, K] in FP8, contiguous, and [N, 1] in fp32. A channel with an infinite element or NaN has
            NaN as its step.
    """
    if not weight.shape[1]:
        step = compute_step(weight.new_zeros(len(weight), 1, dtype=torch.float32))
        return weight.to(E4M3), step
    return quantize_channels(weight)


@fp8_quantize_channels.register_fake
def _(weight: Tensor) -> tuple[Tensor, Tensor]:
    values = torch.empty(weight.shape, dtype=E4M3, device=weight.device)
    return values, torch.empty(weight.shape[0], 1, dtype=torch.float32, device=weight.device)


@op("fp8_dequantize")
def fp8_dequantize(values: Tensor, step: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers that FP8 values stand for.

    Args:
        values: E4M3 of any shape.
        step: in fp32, of a shape that broadcasts to that of the values.
        dtype: of the result.
    """
    return dequantize(values, step, dtype).contiguous()


@fp8_dequantize.register_fake
def _(values: Tensor, step: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(values.shape, dtype=dtype, device=values.device)


@op("fp8_linear")
def fp8_linear(
    a: Tensor, b: Tensor, a_step: Tensor, b_steps: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return `a @ b.T` of FP8 values times their steps, with a bias: a GEMM on FP8 tensor cores.

    Sums are in fp32. The bias is added in fp32 behind them, and the result is rounded once.

    Args:
        a: [M, K] in E4M3.
        b: [N, K] in E4M3.
        a_step: one element in fp32.
        b_steps: [N, 1] in fp32.
        bias: [N], or None.
        dtype: of the result.
    """
    a_steps = a_step.reshape(1, 1).expand(a.shape[0], 1).contiguous()
    result: Tensor = fp8.fp8_gemm_rows(a, b, a_steps, b_steps, bias, dtype)
    return result


@fp8_linear.register_fake
def _(
    a: Tensor, b: Tensor, a_step: Tensor, b_steps: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0], dtype=dtype)


@op("fp8_weight_linear")
def fp8_weight_linear(x: Tensor, weight: Tensor, steps: Tensor, bias: Tensor | None) -> Tensor:
    """Return a linear layer of a floating-point activation and a weight stored in FP8.

    Blocks of output channels are dequantized one after the other, so no whole weight is.

    Args:
        x: [M, K] in fp32, bf16 or fp16.
        weight: [N, K] in E4M3, without NaN.
        steps: [N, 1] in fp32.
        bias: [N] in the dtype of x, or None.
    """
    rows = max(1, BLOCK // max(1, weight.shape[1]))
    with torch.autocast(x.device.type, enabled=False):
        parts = [
            F.linear(
                x,
                decode_block(weight[n : n + rows], steps[n : n + rows], x.dtype),
                None if bias is None else bias[n : n + rows],
            )
            for n in range(0, weight.shape[0], rows)
        ]
    if not parts:
        return x.new_empty(x.shape[0], 0)
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, 1)


@fp8_weight_linear.register_fake
def _(x: Tensor, weight: Tensor, steps: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def _refuse_backward(ctx: Any, *gradients: Any) -> NoReturn:
    """Raise `QuantizationError`: rounding has no useful gradient."""
    raise QuantizationError(
        "inference of a model in FP8",
        "a backward through it, or a compilation with gradients enabled",
        "Call it under torch.no_grad(); train in FP8 with quantization.fp8.prepare_fp8.",
    )


for each in (
    *(fp8_quantize_tensor, fp8_quantize_channels, fp8_dequantize, fp8_weight_linear),
    *(fp8.fp8_quantize_rows, fp8.fp8_gemm_rows),
):
    each.register_autograd(_refuse_backward)


def decode_block(values: Tensor, steps: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `fp8_dequantize` of finite values, five times as fast as torch's conversion on CPUs.

    E4M3 moved by 7 bits is the same number in fp16, times 2^-8. Unlike torch's conversion of FP8,
    that of fp16 is vectorized.

    Args:
        values: [N, K] in E4M3, without NaN.
        steps: [N, 1] in fp32.
        dtype: of the result.
    """
    bits = values.view(torch.int8).to(torch.int16)  # repeats the sign
    bits = bits.bitwise_left_shift_(7).bitwise_and_(0xBF80 - 0x10000)
    return bits.view(torch.float16).float().mul_(steps * 2.0**8).to(dtype)
