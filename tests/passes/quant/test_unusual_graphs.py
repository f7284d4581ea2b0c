"""Graphs around quantized values that are no pattern, and must give eager's numbers."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ipex_inductor.errors import QuantizationError
from ipex_inductor.reporting import decisions
from support.int8_nets import Quantize, QuantizeByNumbers, dequantized_weight


class Function(nn.Module):
    """A function of the module, its inputs and parameters of 16 columns."""

    def __init__(self, function, zero_point: int = 10) -> None:
        super().__init__()
        self.function = function
        self.quantize = Quantize(0.05, zero_point)
        self.signed = Quantize(0.05, 10, torch.int8)
        self.numbers = QuantizeByNumbers(0.05, 10)
        self.weight = nn.Parameter(torch.randn(16, 16))
        self.kernel = nn.Parameter(torch.randn(16, 16, 3, 3))

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(self, *inputs)


def by_row(x: Tensor) -> Tensor:
    """Round rows to int8 by scales of their own."""
    ops = torch.ops.quantized_decomposed
    scale = (x.abs().amax(-1, keepdim=True) / 127).clamp_min(1e-7)
    words = scale, torch.zeros_like(scale, dtype=torch.int32), -128, 127, torch.int8
    return ops.dequantize_per_token(ops.quantize_per_token(x, *words), *words, torch.float32)


def add_rows(m: Function, x: Tensor) -> Tensor:
    rounded = by_row(x)
    return F.linear(rounded, dequantized_weight(m.weight)) + rounded


LEFT, RIGHT = (2, 6, 16), (2, 16, 5)
# Functions, and shapes of their inputs.
GRAPHS = {
    "products in another dtype": (
        lambda m, a, b: torch.bmm(m.quantize(a), m.quantize(b)).half() * 0.125,
        [LEFT, RIGHT],
    ),
    "scales that are numbers": (
        lambda m, a, b: torch.bmm(m.numbers(a), m.numbers(b)),
        [LEFT, RIGHT],
    ),
    "heads of one weight": (
        lambda m, x: torch.bmm(x + 0, dequantized_weight(m.weight).t().view(2, 8, 16)).reshape(
            -1, 16
        ),
        [(2, 6, 8)],
    ),
    "rows as addend": (add_rows, [(6, 16)]),
    "a bias of one element": (
        lambda m, x: F.linear(by_row(x), dequantized_weight(m.weight), m.weight[0, :1]),
        [(6, 16)],
    ),
    "a weight that is an input": (
        lambda m, x, w: F.linear(m.quantize(x), dequantized_weight(w)),
        [(6, 16), (8, 16)],
    ),
}


@pytest.mark.usefixtures("op_by_op")
@pytest.mark.parametrize("name", GRAPHS)
def test_results_are_those_of_eager(name: str) -> None:
    check_graph(name)


@pytest.mark.sampled("products in another dtype", "rows as addend")
@pytest.mark.parametrize("name", GRAPHS)
def test_results_of_generated_code_are_those_of_eager(name: str) -> None:
    check_graph(name)


@torch.no_grad()
def check_graph(name: str) -> None:
    """Compare the result of a compiled graph with eager's."""
    torch.manual_seed(0)
    function, shapes = GRAPHS[name]
    model, inputs = Function(function).eval(), [torch.randn(shape) for shape in shapes]
    result, truth = torch.compile(model, backend="ipex")(*inputs), model(*inputs)
    # Sums of fp32 in another order; results of fp16 have 11 bits.
    rtol = 2e-3 if truth.dtype == torch.float16 else 1e-4
    torch.testing.assert_close(result, truth, rtol=rtol, atol=rtol)
    assert not decisions.reports()[-1].count("fallback")


@torch.no_grad()
def test_products_over_nothing_are_zero() -> None:
    """The keys of an empty cache, say."""
    model = Function(lambda m, a, b: torch.bmm(m.signed(a), m.signed(b))).eval()
    run = torch.compile(model, backend="ipex", dynamic=True)
    run(torch.randn(LEFT), torch.randn(RIGHT))
    result = run(torch.randn(2, 6, 0), torch.randn(2, 0, 5))
    assert torch.equal(result, torch.zeros(2, 6, 5))


@torch.no_grad()
def test_a_zero_point_that_padding_cannot_have_is_refused() -> None:
    def convolve(m: Function, x: Tensor) -> Tensor:
        return F.conv2d(m.quantize(x), dequantized_weight(m.kernel), None, 1, 1)

    run = torch.compile(Function(convolve, zero_point=-20).eval(), backend="ipex")
    with pytest.raises(QuantizationError, match="zero point"):
        run(torch.randn(2, 16, 13, 13))
