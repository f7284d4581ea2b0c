"""Split fp32 into two halves: bf16, which is its upper 16 bits, and the lower 16 bits as int16."""

import sys

import torch
from torch import Tensor

LOWER, UPPER = (0, 1) if sys.byteorder == "little" else (1, 0)


def halves(full: Tensor) -> tuple[Tensor, Tensor]:
    """Return the lower and upper halves of `full` (fp32, any strides) as int16 views."""
    pairs = full.unsqueeze(-1).view(torch.int16)
    return pairs[..., LOWER], pairs[..., UPPER]


def split(full: Tensor) -> tuple[Tensor, Tensor]:
    """Return `full` (fp32) split into upper halves (bf16) and lower halves (int16), same strides.

    Bits are cut, not rounded, so `join` restores every value, including NaN payloads.
    """
    lower, upper = (torch.empty_like(full, dtype=torch.int16).copy_(h) for h in halves(full))
    return upper.view(torch.bfloat16), lower


def join(upper: Tensor, lower: Tensor) -> Tensor:
    """Return the fp32 values that `split` cut into `upper` and `lower`, in new memory."""
    full = torch.empty_like(upper, dtype=torch.float32)
    write(lower, upper, *halves(full))
    return full


def write(lower: Tensor, upper: Tensor, to_lower: Tensor, to_upper: Tensor) -> None:
    """Copy both halves bit by bit into `to_lower` and `to_upper`."""
    to_lower.copy_(lower)
    to_upper.view(torch.int16).copy_(upper.view(torch.int16))
