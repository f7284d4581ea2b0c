"""GELU of a sum that is not rounded yet, exact to 16-bit precision, in few instructions.

A GEMM kernel cannot hide torch's error function: its hundred instructions per element took half as
long as the GEMM with K = 768 before it.
"""

import torch
from torch import Tensor

# exp(x^2 / 2) Phi(-x) on [0, CLAMP] as a polynomial, the highest power first. It was fitted by
# least
# squares on relative errors, which were reweighted until the largest was 1.7e-5.
MILLS = (
    -2.02256304e-06,
    5.11044963e-05,
    -0.000571485857,
    0.00376363698,
    -0.0164943325,
    0.0520567193,
    -0.126280549,
    0.2476803,
    -0.39861246,
    0.499991716,
)
CLAMP = 4.5  # beyond it, GELU of a negative number is less than 2e-5


def gelu(x: Tensor) -> Tensor:
    """Return `x Phi(x)` as `relu(x) - |x| Phi(-|x|)`, with an error of 3e-6, or 2e-5 relative."""
    size = x.abs()
    clamped = torch.where(size < CLAMP, size, CLAMP)
    ratio = clamped * MILLS[0] + MILLS[1]
    for factor in MILLS[2:]:
        ratio = ratio * clamped + factor
    return 0.5 * x + 0.5 * size - clamped * ratio * torch.exp2(x * (x * -0.7213475204444817))


def gelu_tanh(x: Tensor) -> Tensor:
    """Return `x sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3))`."""
    exponent = x * (-2.302208198144325 - 0.1029432395800235 * (x * x))
    return x / (torch.exp2(exponent) + 1.0)


# Short forms of activations, equal to the full ones in results of 16 bits.
SHORT = {"gelu": gelu, "gelu_tanh": gelu_tanh}
