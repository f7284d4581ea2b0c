"""Observers: ranges of values, in fixed memory, and errors that name the layer."""

import math

import pytest
import torch

from ipex_inductor.errors import QuantizationError
from ipex_inductor.quantization.observers import (
    BINS,
    OBSERVERS,
    HistogramObserver,
    MinMaxObserver,
    MovingAverageObserver,
    PercentileObserver,
    make_observer,
)
from ipex_inductor.quantization.scheme import MIN_SCALE, Scheme, scale_of_range

pytestmark = pytest.mark.unit

KINDS = sorted(OBSERVERS)


def round_to(values, scale):
    first, last, _ = scale.bounds
    steps = torch.round(values.double() / scale.scale) + scale.zero_point
    return (steps.clamp(first, last) - scale.zero_point) * scale.scale


def squared_error(values, scale):
    return (round_to(values, scale) - values).square().sum().item()


def observe(observer, *batches):
    for batch in batches:
        observer(batch)
    return observer


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_zeros_have_a_scale(kind, symmetric):
    observer = observe(make_observer("a", Scheme(observer=kind)), torch.zeros(4, 5))
    scale = observer.find_scale(symmetric)
    assert scale.scale > 0
    assert scale.zero_point == 0
    assert torch.equal(round_to(torch.zeros(3), scale), torch.zeros(3).double())


@pytest.mark.parametrize("constant", [3.7, -2.1, 1e-9, 1e30])
@pytest.mark.parametrize("kind", KINDS)
def test_constants_are_exact(kind, constant):
    values = torch.full((100,), constant)
    scale = observe(make_observer("a", Scheme(observer=kind)), values).find_scale(False)
    # The scale is a rounded quotient, of 24 bits; histograms keep values within their bin.
    error = 1 / BINS if kind in ("histogram", "percentile") else 1e-6
    assert (round_to(values, scale) / constant - 1).abs().max() <= error


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_names_the_layer(kind, bad):
    observer = make_observer("layer1.conv:conv2d:0", Scheme(observer=kind))
    with pytest.raises(QuantizationError, match=r"layer1\.conv:conv2d:0"):
        observer(torch.tensor([1.0, bad, 2.0]))
    assert not observer.is_calibrated


def test_min_max():
    observer = observe(MinMaxObserver("a"), torch.tensor([1.0, 2.0]), torch.tensor([-3.0, 1.0]))
    assert observer.find_range(False) == (-3, 2)


def test_moving_average():
    observer = MovingAverageObserver("a", averaging_constant=0.25)
    observe(observer, torch.tensor([0.0, 4.0]), torch.tensor([-4.0, 8.0]))
    assert observer.find_range(False) == (-1, 5)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_was_observed_of_empty_tensors(kind):
    observer = observe(make_observer("a", Scheme(observer=kind)), torch.zeros(0, 3))
    assert not observer.is_calibrated


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(dtype):
    observer = observe(HistogramObserver("a"), torch.linspace(-1, 3, 1000).to(dtype))
    low, high = observer.find_range(False)
    assert -1.01 < low < -0.9
    assert 2.9 < high < 3.01


def test_histograms_count_all_values_in_fixed_memory():
    observer = HistogramObserver("a")
    batches = [torch.randn(1000) * 10**power for power in range(-3, 4)]
    for batch in batches:
        observer(batch)
        assert observer.counts.shape == (BINS,)
    assert observer.counts.sum() == 7000
    edges = observer.edges()
    values = torch.cat(batches).double()
    assert edges[0] <= values.min()
    assert values.max() <= edges[-1]
    assert edges[0] <= 0 <= edges[-1]


def test_a_grown_histogram_equals_one_of_all_values():
    parts = [torch.rand(500), torch.rand(500) * 7, -torch.rand(500) * 3]
    grown = observe(HistogramObserver("a"), *parts)
    whole = torch.histc(torch.cat(parts).double(), BINS, grown.low, grown.high)
    # A value at the edge of two bins may count in the other one: float32 rounds the quotient.
    assert (grown.counts.cumsum(0) - whole.cumsum(0)).abs().max() <= 3


def test_counts_beyond_the_integers_of_float32():
    many = torch.ones(1).expand(2**24 + 3)  # float32 adds no one to 2^24
    observer = observe(HistogramObserver("a"), torch.tensor([0.0, 2.0]), many)
    assert observer.counts.sum() == 2**24 + 5


def test_zeros_before_other_values_are_counted():
    observer = observe(HistogramObserver("a"), torch.zeros(100), torch.tensor([-1.0, 3.0]))
    assert observer.counts.sum() == 102
    assert observer.counts[observer._zero_bin()] == 100


def test_the_widest_range_of_float32():
    largest = torch.finfo(torch.float32).max
    values = torch.tensor([-largest, largest, 0.0, 1.0])
    for kind in KINDS:
        scale = observe(make_observer("a", Scheme(observer=kind)), values).find_scale(False)
        assert math.isfinite(scale.scale)
        assert 0 <= scale.zero_point <= 255


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(
    "values",
    [
        torch.randn(20_000),
        torch.randn(20_000).relu(),
        torch.cat([torch.randn(20_000), torch.tensor([40.0, -60.0])]),
        torch.distributions.Laplace(0, 1).sample((20_000,)),
        torch.randn(20_000).sigmoid(),
    ],
    ids=["normal", "relu", "outliers", "laplace", "sigmoid"],
)
def test_the_range_of_least_error(values, symmetric):
    scale = observe(HistogramObserver("a"), values).find_scale(symmetric)
    error = squared_error(values, scale)
    low, high = values.min().item(), values.max().item()
    assert error <= 1.02 * squared_error(values, scale_of_range(low, high, symmetric))
    grid = [i / 24 for i in range(1, 25)]
    ranges = [(a * min(low, 0.0), b * high) for a in grid for b in grid]
    best = min(squared_error(values, scale_of_range(*bounds, symmetric)) for bounds in ranges)
    # The search moves one end at a time and sees centers of bins, not the values.
    assert error <= 1.05 * best


def test_percentile():
    values = torch.arange(10_000) / 10_000
    low, high = observe(PercentileObserver("a", percentile=90), values).find_range(False)
    assert abs(low - 0.1) < 2 / BINS
    assert abs(high - 0.9) < 2 / BINS


def test_percentile_of_symmetric_values():
    values = torch.cat([torch.linspace(-1, 1, 10_001), torch.tensor([50.0])])
    low, high = observe(PercentileObserver("a", percentile=99), values).find_range(True)
    assert low == -high
    assert abs(high - 0.99) < 2 * 51 / BINS


def test_reset():
    observer = observe(HistogramObserver("a"), torch.randn(9))
    observer.reset()
    assert not observer.is_calibrated
    assert observer.find_scale(False).scale == pytest.approx(MIN_SCALE)


@pytest.mark.parametrize(
    "scheme",
    [Scheme(observer="entropy"), Scheme(observer="min_max", observer_args=(("bins", 3.0),))],
)
def test_unknown_observers_and_arguments(scheme):
    with pytest.raises(QuantizationError):
        make_observer("a", scheme)


@pytest.mark.parametrize("symmetric", [False, True])
def test_zero_is_a_step_of_every_scale(symmetric):
    for low, high in [(-1.3, 2.7), (0.5, 2.0), (-4.0, -1.0), (-1e-8, 1e8)]:
        scale = scale_of_range(low, high, symmetric)
        first, last, _ = scale.bounds
        assert first <= scale.zero_point <= last
        assert scale.scale == torch.tensor(scale.scale).item()  # a value of float32
