"""Transposed and one-dimensional convolutions on integers: what fires, and with which numbers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from passes.quant.test_products import compiled, int8_events, reasons, run_as_it_stands
from torch import Tensor, nn

from ipex_inductor.templates.cpu import int8
from support.helpers import code_of
from support.int8_nets import Net, Quantize, dequantized_weight

pytestmark = pytest.mark.skipif(int8.why_not() is not None, reason=f"{int8.why_not()}")
CONVS: dict[int, Callable[..., Tensor]] = {
    1: F.conv_transpose1d,
    2: F.conv_transpose2d,
    3: F.conv_transpose3d,
}


class Transposed(nn.Module):
    """A transposed convolution of quantized values, whose result is quantized too."""

    def __init__(self, groups: int, *taps: int, **words: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 6 // groups, *taps) / 6)
        self.bias = nn.Parameter(torch.randn(6))
        self.q, self.r = Quantize(0.025, 117), Quantize(0.03, 121)
        self.words = words | {"groups": groups}

    def convolve(self, x: Tensor) -> Tensor:
        """Return the result in floating point."""
        weight, conv = dequantized_weight(self.weight, axis=1), CONVS[x.dim() - 2]
        return conv(self.q(x), weight, self.bias, **self.words)

    def forward(self, x: Tensor) -> Tensor:
        return self.r(self.convolve(x).relu())


CASES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "stride 1": ((1, 3, 3), {"padding": 1}),
    "stride 1 without padding": ((1, 3, 2), {}),
    "2 x 2 by 2": ((1, 2, 2), {"stride": 2}),
    "3 x 3 by 2": ((1, 3, 3), {"stride": 2, "padding": 1, "output_padding": 1}),
    "4 x 4 by 2": ((1, 4, 4), {"stride": 2, "padding": 1}),
    "5 x 3 by 3 x 2": ((1, 5, 3), {"stride": (3, 2), "padding": (1, 0)}),
    "2 x 2 by 3": ((1, 2, 2), {"stride": 3}),
    "more output": ((1, 2, 3), {"stride": (3, 4), "output_padding": (2, 3)}),
    "padded by whole pixels": ((1, 5, 5), {"stride": 2, "padding": (4, 3)}),
    "groups": ((2, 3, 3), {"stride": 2, "padding": 1}),
    "one dimension": ((1, 4), {"stride": 2, "padding": 1}),
    "one dimension in groups": ((2, 3), {"stride": 3}),
    "three dimensions": ((1, 2, 3, 2), {"stride": (2, 2, 1), "padding": (0, 1, 0)}),
}


def run_both(model: nn.Module, x: Tensor, **words: Any) -> None:
    """Compare results: those in steps of 0.03 are bit-equal but for ties, at most a step apart."""
    with torch.no_grad():
        run = compiled(model, **words)
        result, expected = run(x), model(x)
    assert (result.shape, result.stride()) == (expected.shape, expected.stride())
    steps = ((result - expected) / 0.03).round().abs()
    assert steps.max() <= 1
    assert (steps > 0).float().mean() < 2e-3


QUICK = ("3 x 3 by 2", "more output", "groups")  # the others take a second each
PARAMS = [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CASES]


@pytest.mark.parametrize("case", PARAMS)
def test_transposed_convolutions_run_on_integers(case: str) -> None:
    (groups, *taps), words = CASES[case]
    model = Transposed(groups, *taps, **words).eval()
    sizes = [7, 6, 5][: len(taps)]
    with run_as_it_stands():
        run_both(model, torch.randn(2, 8, *sizes))
    # No rule fuses what is behind a transposed convolution that oneDNN has not.
    name = "conv" if len(taps) == 1 else "conv+relu+quantize"
    assert int8_events() == {("fired", f"int8 {name}"): 1}


def test_depthwise_ones_run_on_integers() -> None:
    model = Transposed(2, 3, 3, stride=2).eval()
    model.weight.data, model.bias.data = torch.randn(8, 1, 3, 3) / 3, torch.randn(8)
    model.words["groups"] = 8
    with run_as_it_stands():
        run_both(model, torch.randn(2, 8, 5, 6))
    assert int8_events() == {("fired", "int8 conv"): 1}


def test_generated_code_serves_all_sizes() -> None:
    """Sizes of image and batch are dynamic."""
    model = Transposed(1, 4, 4, stride=2, padding=1).eval()
    with torch.no_grad():
        run = compiled(model, dynamic=True)
        *_, code = code_of(run, torch.randn(4, 8, 7, 5))
        assert "ipex_int8" in code
        for size in ((2, 8, 5, 6), (3, 8, 9, 7)):
            x = torch.randn(size)
            steps = ((run(x) - model(x)) / 0.03).round().abs()
            assert steps.max() <= 1
            assert (steps > 0).float().mean() < 2e-3
    assert int8_events() == {("fired", "int8 conv+relu+quantize"): 1}


class OneDimension(nn.Module):
    """A convolution over one dimension of quantized values, an addend or none, and ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4, 3) / 4)
        self.q, self.r = Quantize(0.025, 117), Quantize(0.03, 121)

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        words = {"stride": 2, "padding": 1, "groups": 2}
        y = F.conv1d(self.q(x), dequantized_weight(self.weight), **words)
        for other in others:
            y = y + other
        return self.r(y.relu())


@pytest.mark.parametrize("residual", [False, True])
def test_one_dimension_is_two(residual: bool) -> None:
    model = OneDimension().eval()
    inputs = [torch.randn(2, 8, 9), *[torch.randn(2, 6, 5)] * residual]
    with run_as_it_stands(), torch.no_grad():
        result, expected = compiled(model)(*inputs), model(*inputs)
    assert result.stride() == expected.stride()
    assert ((result - expected) / 0.03).round().abs().max() <= 1
    name = "int8 conv+add+relu" if residual else "int8 conv+relu"
    assert int8_events() == {("fired", f"{name}+quantize"): 1}


MISSES = {
    "dilation": (Transposed(1, 3, 3, dilation=2), "no dilation"),
    "padding beyond the kernel": (Transposed(1, 1, 3, stride=2, padding=(2, 0)), "whole pixels"),
    "scales of inputs": (
        Net(
            lambda q, x: F.conv_transpose2d(q(x), dequantized_weight(torch.ones(8, 4, 3, 3))),
            Quantize(0.025, 117),
        ),
        "no scale of each output",
    ),
}


@pytest.mark.parametrize("name", MISSES)
def test_near_misses_are_right(name: str) -> None:
    model, reason = MISSES[name]
    x = torch.randn(2, 8, 7, 6)
    with run_as_it_stands(), torch.no_grad():
        torch.testing.assert_close(compiled(model)(x), model(x), rtol=1e-5, atol=1e-4)
    assert int8_events() == {("missed", "int8 conv_transpose"): 1}
    assert reason in reasons()[0]
