"""Observers: the range of a tensor's values over the calibration data, in fixed memory."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from ipex_inductor.errors import QuantizationError
from ipex_inductor.ops.quant.fp8_steps import E4M3, LARGEST
from ipex_inductor.quantization.scheme import (
    MIN_SCALE,
    Scheme,
    TensorScale,
    fp8_scale_of_range,
    scale_of_range,
)

BINS = 2048  # of histograms, as torch.ao's
AVERAGING = 0.01  # weight of a new batch in moving averages, as IPEX's and torch.ao's
PERCENTILE = 99.9  # share of values in percent that a percentile observer keeps in its range
CANDIDATES = 128  # positions of each end of the range that the histogram observer compares
FP8_CANDIDATES = 8  # scales in E4M3 that it compares, each half of the one before
ROUNDS = 2  # of the search, one end at a time
# Elements that torch.histc counts at once: it adds ones in float32, which is exact up to 2^24.
CHUNK = 1 << 23
LARGEST_FLOAT32_RANGE = 1e37  # wider histograms are counted in float64, as their width overflows


class Observer(nn.Module):
    """Base of observers: checks values, and reads them without changing them."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.low = self.high = 0.0
        self.batches = 0

    @property
    def is_calibrated(self) -> bool:
        """Return whether any values were observed."""
        return self.batches > 0

    @torch.no_grad()
    def forward(self, values: Tensor) -> None:
        """Observe a tensor.

        Raises:
            QuantizationError: if a value is NaN or infinite.
        """
        if values.numel() == 0:
            return
        values = values.detach()
        low, high = (bound.item() for bound in torch.aminmax(values))
        if not math.isfinite(low) or not math.isfinite(high):
            bad = "NaN" if math.isnan(low) or math.isnan(high) else "infinite values"
            raise QuantizationError(
                f"finite activations at {self.name!r}",
                bad,
                "Check the calibration data and the model: its floating-point output has them too.",
            )
        self.update(values, low, high)
        self.batches += 1

    def update(self, values: Tensor, low: float, high: float) -> None:
        """Add values to what is known; `low` and `high` are the smallest and the largest."""
        raise NotImplementedError

    def find_range(self, symmetric: bool) -> tuple[float, float]:
        """Return the range that is quantized."""
        return self.low, self.high

    def find_scale(self, symmetric: bool) -> TensorScale:
        """Return scale and zero point for the observed values."""
        return scale_of_range(*self.find_range(symmetric), symmetric)

    def find_fp8_scale(self) -> TensorScale:
        """Return the scale in E4M3 for the observed values."""
        return fp8_scale_of_range(*self.find_range(symmetric=True))

    def reset(self) -> None:
        """Forget all values."""
        self.low = self.high = 0.0
        self.batches = 0


class MinMaxObserver(Observer):
    """The smallest and the largest value."""

    def update(self, values: Tensor, low: float, high: float) -> None:
        """Widen the range."""
        self.low = min(low, self.low) if self.batches else low
        self.high = max(high, self.high) if self.batches else high


class MovingAverageObserver(Observer):
    """Moving averages of the smallest and the largest value of each batch."""

    def __init__(self, name: str, averaging_constant: float = AVERAGING) -> None:
        super().__init__(name)
        self.averaging_constant = averaging_constant

    def update(self, values: Tensor, low: float, high: float) -> None:
        """Move the range towards that of the batch."""
        weight = self.averaging_constant if self.batches else 1.0
        self.low += weight * (low - self.low)
        self.high += weight * (high - self.high)


class HistogramObserver(Observer):
    """A histogram of all values; the range is the one with the least squared error.

    The histogram always contains zero. It doubles its range, merging pairs of bins, until a new
    value fits, so its memory is fixed and its order of additions does not matter.
    """

    def __init__(self, name: str, bins: float = BINS) -> None:
        super().__init__(name)
        self.bins = max(2, int(bins) // 2 * 2)  # pairs are merged
        self.counts: Tensor | None = None

    def reset(self) -> None:
        """Forget all values."""
        super().reset()
        self.counts = None

    def update(self, values: Tensor, low: float, high: float) -> None:
        """Count values."""
        counts, device = self.counts, values.device
        if counts is None or self.low == self.high:
            zeros = 0.0 if counts is None else counts.sum().item()
            self.low, self.high = min(low, 0.0), max(high, 0.0)
            counts = torch.zeros(self.bins, dtype=torch.float64, device=device)
            counts[self._zero_bin()] += zeros
        counts = self._grow(counts.to(device), low, high)
        self.counts = counts + self._count(values)

    def _zero_bin(self) -> int:
        width = (self.high - self.low) / self.bins
        return min(int(-self.low / width), self.bins - 1) if width else 0

    def _grow(self, counts: Tensor, low: float, high: float) -> Tensor:
        """Return the counts after the range was doubled until it contains `low` and `high`."""
        while low < self.low or high > self.high:
            merged, empty = counts.view(-1, 2).sum(1), counts.new_zeros(self.bins // 2)
            width = self.high - self.low
            if low < self.low:
                self.low -= width
                counts = torch.cat([empty, merged])
            else:
                self.high += width
                counts = torch.cat([merged, empty])
        return counts

    def _count(self, values: Tensor) -> Tensor:
        if self.low == self.high:
            counts = torch.zeros(self.bins, dtype=torch.float64, device=values.device)
            counts[0] = values.numel()
            return counts
        wide = self.high - self.low > LARGEST_FLOAT32_RANGE
        dtype = torch.float64 if wide else torch.float32
        chunks = torch.split(_flatten(values), CHUNK)
        parts = [
            torch.histc(chunk.to(dtype), self.bins, self.low, self.high).double()
            for chunk in chunks
        ]
        return torch.stack(parts).sum(0)

    def edges(self) -> Tensor:
        """Return the lower bounds of the bins and the upper bound of the last, in float64."""
        steps = torch.arange(self.bins + 1, dtype=torch.float64) / self.bins
        return self.low + steps * (self.high - self.low)

    def find_range(self, symmetric: bool) -> tuple[float, float]:
        """Return the range whose quantization has the least squared error."""
        if self.counts is None or self.low == self.high:
            return self.low, self.high
        return _find_best_range(self._centers(), self.counts.cpu(), symmetric)

    def find_fp8_scale(self) -> TensorScale:
        """Return the scale whose rounding to E4M3 has the least squared error."""
        if self.counts is None or self.low == self.high:
            return fp8_scale_of_range(self.low, self.high)
        edges, counts = self.edges(), self.counts.cpu()
        values, used = self._centers(), counts > 0
        whole = fp8_scale_of_range(edges[:-1][used].min().item(), edges[1:][used].max().item())
        scales = [whole.scale / 2**halvings for halvings in range(FP8_CANDIDATES)]
        best = min(scales, key=lambda scale: _squared_fp8_error(values, counts, scale))
        return whole._replace(scale=max(best, MIN_SCALE))

    def _centers(self) -> Tensor:
        """Return the value that stands for each bin: its center, and zero for the bin of zero."""
        edges = self.edges()
        centers = (edges[1:] + edges[:-1]) / 2
        centers[self._zero_bin()] = 0
        return centers


class PercentileObserver(HistogramObserver):
    """A histogram of all values; the range leaves out the rarest values at both ends."""

    def __init__(self, name: str, percentile: float = PERCENTILE, bins: float = BINS) -> None:
        super().__init__(name, bins)
        self.percentile = percentile

    def find_range(self, symmetric: bool) -> tuple[float, float]:
        """Return the range without the values beyond the percentile."""
        if self.counts is None or self.low == self.high:
            return self.low, self.high
        edges, counts = self.edges(), self.counts.cpu()
        if symmetric:
            far = torch.maximum(edges[1:].abs(), edges[:-1].abs())
            order = far.argsort()
            bound = far[order][self._bins_within(counts[order])].item()
            return -bound, bound
        high = edges[1:][self._bins_within(counts)].item()
        low = edges[:-1].flip(0)[self._bins_within(counts.flip(0))].item()
        return low, high

    def find_fp8_scale(self) -> TensorScale:
        """Return the scale in E4M3 for the range without the values beyond the percentile."""
        return fp8_scale_of_range(*self.find_range(symmetric=True))

    def _bins_within(self, counts: Tensor) -> int:
        """Return the first bin up to which `percentile` of all values are counted."""
        wanted = counts.sum() * (self.percentile / 100)
        return min(int(torch.searchsorted(counts.cumsum(0), wanted)), self.bins - 1)


def _flatten(values: Tensor) -> Tensor:
    """Return all elements in the order of memory, so that no layout needs a copy."""
    order = sorted(range(values.dim()), key=values.stride, reverse=True)
    return values.permute(order).reshape(-1)


def _find_best_range(values: Tensor, counts: Tensor, symmetric: bool) -> tuple[float, float]:
    """Return the range of least squared error, one end moved at a time."""
    used = counts > 0
    values, counts = values[used], counts[used]
    low, high = min(values.min().item(), 0.0), max(values.max().item(), 0.0)
    shares = torch.arange(1, CANDIDATES + 1, dtype=torch.float64) / CANDIDATES
    if symmetric:
        bounds = shares * max(high, -low)
        best = bounds[_squared_errors(values, counts, -bounds, bounds, True).argmin()].item()
        return -best, best
    for _ in range(ROUNDS):
        highs = shares * high
        errors = _squared_errors(values, counts, torch.full_like(highs, low), highs, False)
        high = highs[errors.argmin()].item()
        lows = shares * low
        errors = _squared_errors(values, counts, lows, torch.full_like(lows, high), False)
        low = lows[errors.argmin()].item()
    return low, high


def _squared_errors(
    values: Tensor, counts: Tensor, lows: Tensor, highs: Tensor, symmetric: bool
) -> Tensor:
    """Return the squared error of quantized values for each range of `lows` and `highs`.

    Args:
        values: one value for each bin.
        counts: how often it was seen.
        lows: lower ends of the ranges, at most 0.
        highs: upper ends, at least 0.
        symmetric: quantize to int8 with zero point 0.
    """
    smallest = torch.finfo(torch.float64).tiny
    scales = ((highs - lows) / 255).clamp_min(smallest)[:, None]
    zeros = torch.zeros_like(scales) if symmetric else torch.round(-lows[:, None] / scales)
    first, last = (-128, 127) if symmetric else (0, 255)
    steps = (torch.round(values / scales) + zeros).clamp_(first, last).sub_(zeros)
    return steps.mul_(scales).sub_(values).square_().matmul(counts)


def _squared_fp8_error(values: Tensor, counts: Tensor, scale: float) -> float:
    """Return the squared error of values in E4M3.

    Args:
        values: one value for each bin.
        counts: how often it was seen.
        scale: what 1 in FP8 stands for.
    """
    steps = (values / scale).clamp(-LARGEST, LARGEST).to(E4M3).double()
    return float((steps * scale - values).square().matmul(counts))


OBSERVERS: dict[str, Any] = {
    "min_max": MinMaxObserver,
    "moving_average": MovingAverageObserver,
    "histogram": HistogramObserver,
    "percentile": PercentileObserver,
}


def make_observer(name: str, scheme: Scheme) -> Observer:
    """Return the observer of a scheme for the tensor `name`."""
    if scheme.observer not in OBSERVERS:
        advice = "Name one of them in the scheme."
        names = sorted(OBSERVERS)
        raise QuantizationError(f"an observer of {names}", repr(scheme.observer), advice)
    try:
        observer: Observer = OBSERVERS[scheme.observer](name, **dict(scheme.observer_args))
    except TypeError as error:
        advice = "Leave out the arguments that this observer does not take."
        raise QuantizationError(f"arguments of {scheme.observer}", str(error), advice) from None
    return observer
