"""Rounding to E4M3 written out in fp64, and linear layers on what it leaves."""

import torch
from torch import Tensor

LARGEST = 448.0
LEAST_EXPONENT = -6  # below it numbers are subnormal
MANTISSA = 3  # bits


def round_e4m3(x: Tensor) -> Tensor:
    """Return numbers rounded to even in E4M3 and saturated, in fp64; NaN stays NaN."""
    x = x.double()
    exponent = torch.frexp(x).exponent.double() - 1  # |x| is in [2^exponent, 2^(exponent + 1))
    ulp = torch.exp2(exponent.clamp_min(LEAST_EXPONENT) - MANTISSA)
    return (torch.round(x / ulp) * ulp).clamp(-LARGEST, LARGEST)


def power_step(amax: Tensor) -> Tensor:
    """Return the least powers of two by which magnitudes fit E4M3, in fp64."""
    return torch.exp2(torch.ceil(torch.log2(amax.double() / LARGEST)))


def round_channels(weight: Tensor) -> Tensor:
    """Return what a weight [N, K] in E4M3 stands for, in fp64."""
    step = power_step(weight.abs().amax(1, keepdim=True))
    return round_e4m3(weight.double() / step) * step


def round_tensor(x: Tensor, step: float) -> Tensor:
    """Return what an activation in E4M3 stands for, in fp64."""
    return round_e4m3(x.double() / step) * step


def check_sums(got: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raise unless a result is that of exact operands, but for roundings of sums in fp32.

    Each of K additions and the bias add rounds a partial sum to 24 bits; the result is then rounded
    to its dtype: at most half a unit in the last place, twice if the bias is added behind it.

    Args:
        got: [..., N].
        x: [..., K] in fp64.
        weight: [N, K] in fp64.
        bias: [N], or None.
    """
    want, size = x @ weight.t(), x.abs() @ weight.abs().t()
    if bias is not None:
        want, size = want + bias.double(), size + bias.double().abs()
    bound = size * (x.shape[-1] + 1) * 2.0**-24
    bound = bound + want.abs() * torch.finfo(got.dtype).eps * (got.dtype is not torch.float32)
    assert ((got.double() - want).abs() <= bound + 1e-30).all()
