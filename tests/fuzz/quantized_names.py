"""What lines of quantized programs name: rounding to 8 bits and back, and where ties lie."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ipex_inductor import compat

QUANTIZED = compat.quantized_ops()
BOUNDS = {"uint8": (0, 255, torch.uint8), "int8": (-128, 127, torch.int8)}
TIE = 1e-3  # of a step: sums of 200 products in fp32 are off by a fourth of it
_distances: list[Tensor] | None = None
_given: set[int] = set()  # addresses of tensors that are not computed, and round alike everywhere


@contextmanager
def recorded_ties(inputs: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Collect where computed values lie within `TIE` of a half step, for each rounding inside."""
    global _distances, _given
    _distances, _given = [], {value.data_ptr() for value in inputs}
    try:
        yield _distances
    finally:
        _distances = None


def q(x: Tensor, scale: float, zero_point: int, dtype: str) -> Tensor:
    """Return `x` rounded by numbers, as torchao writes it."""
    _record(x, scale)
    words = scale, zero_point, *BOUNDS[dtype]
    integers = QUANTIZED.quantize_per_tensor.default(x, *words)
    return QUANTIZED.dequantize_per_tensor.default(integers, *words)


def qt(x: Tensor, scale: float, zero_point: int, dtype: str) -> Tensor:
    """Return `x` rounded by tensors of one element, as our recipe writes it."""
    _record(x, scale)
    numbers = torch.full((), scale), torch.full((), zero_point, dtype=torch.int32)
    words = *numbers, *BOUNDS[dtype]
    integers = QUANTIZED.quantize_per_tensor.tensor(x, *words)
    return QUANTIZED.dequantize_per_tensor.tensor(integers, *words)


def qw(weight: Tensor, axis: int) -> Tensor:
    """Return a weight rounded to int8 by the scale of each channel."""
    scale = weight.abs().amax([d for d in range(weight.dim()) if d != axis]) / 127.5
    zeros = torch.zeros_like(scale, dtype=torch.int64)
    words = scale, zeros, axis, -128, 127, torch.int8
    integers = QUANTIZED.quantize_per_channel.default(weight, *words)
    return QUANTIZED.dequantize_per_channel.default(integers, *words)


def _record(x: Tensor, scale: float) -> None:
    if _distances is not None and x.data_ptr() not in _given:
        steps = x.double() / scale
        _distances.append((steps - steps.floor() - 0.5).abs() < TIE)


NAMES = {"q": q, "qt": qt, "qw": qw}
