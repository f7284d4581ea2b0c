"""Convolutions that no kernel on integers serves: they stay as they are, with the reason."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ipex_inductor.passes.quant.products import quantize_products
from support.int8_nets import QUANTIZED
from support.rewritten import count, rewrite

aten, ipex = torch.ops.aten, torch.ops.ipex
S8, U8 = torch.int8, torch.uint8
Event = tuple[str, str, str]
NO_SCALE = "the weight has no scale of each output channel"


def rewrite_products(
    fn: Callable[..., Tensor], *inputs: Tensor
) -> tuple[torch.fx.GraphModule, list[Event]]:
    """Return the graph of a function behind the pass, and its events; their values are compared."""
    return rewrite(lambda *args: quantize_products(*args, lambda _: None), fn, *inputs)


def dequantize_input(x: Tensor) -> Tensor:
    integers = QUANTIZED.quantize_per_tensor.default(x, 0.025, 117, 0, 255, U8)
    return QUANTIZED.dequantize_per_tensor.default(integers, 0.025, 117, 0, 255, U8)


def per_channel(weight: Tensor, scale: Tensor, axis: int) -> Tensor:
    zeros = torch.zeros_like(scale, dtype=torch.int64)
    return QUANTIZED.dequantize_per_channel.default(weight, scale, zeros, axis, -128, 127, S8)


def per_tensor(weight: Tensor) -> Tensor:
    bounds = (0, 255) if weight.dtype == U8 else (-128, 127)
    return QUANTIZED.dequantize_per_tensor.default(weight, 0.01, 0, *bounds, weight.dtype)


def random_weight(*shape: int, dtype: torch.dtype = S8) -> Tensor:
    return torch.randint(0, 100, shape, dtype=dtype)


@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("outs", [8, 6])
def test_scales_of_another_dimension_than_the_outputs(outs: int, axis: int) -> None:
    weight = random_weight(outs, 8, 3)
    scale = torch.rand(weight.shape[axis]) + 0.1

    def run(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        return F.conv1d(dequantize_input(x), per_channel(weight, scale, axis))

    gm, events = rewrite_products(run, torch.randn(2, 8, 9), weight, scale)
    assert events == [("missed", "int8 conv", NO_SCALE)]
    assert count(gm, aten.convolution.default) == 1


@pytest.mark.parametrize("conv", [F.conv1d, F.conv_transpose1d])
def test_weights_in_uint8(conv: Callable[..., Tensor]) -> None:
    def run(x: Tensor, weight: Tensor) -> Tensor:
        return conv(dequantize_input(x), per_tensor(weight))

    gm, events = rewrite_products(run, torch.randn(2, 8, 9), random_weight(8, 8, 3, dtype=U8))
    name = "int8 conv" if conv is F.conv1d else "int8 conv_transpose"
    reason = "kernels take 8-bit activations and int8 weights, not torch.uint8 and torch.uint8"
    assert events == [("missed", name, reason)]
    assert count(gm, aten.convolution.default) == 1


@pytest.mark.parametrize("conv", [F.conv2d, F.conv_transpose2d])
@pytest.mark.parametrize("words", [{"stride": (2,)}, {"stride": (2, 1), "padding": (1,)}])
def test_one_number_stands_for_both_dimensions(
    conv: Callable[..., Tensor], words: dict[str, Any]
) -> None:
    def run(x: Tensor, weight: Tensor) -> Tensor:
        return conv(dequantize_input(x), per_tensor(weight), **words)

    gm, events = rewrite_products(run, torch.randn(2, 8, 7, 6), random_weight(8, 8, 3, 3))
    assert events == [("fired", "int8 conv", "")]
    (call,) = gm.graph.find_nodes(op="call_function", target=ipex.int8_conv.default)
    assert [2, 2] in call.args or [2, 1] in call.args or conv is F.conv_transpose2d


def convolve_transposed(x: Tensor, weight: Tensor, **words: Any) -> Tensor:
    return F.conv_transpose2d(dequantize_input(x), per_tensor(weight), **words)


def convolve_to_unary(x: Tensor, weight: Tensor) -> Tensor:
    window = [1, 1], [0, 0], [1, 1], True, [0, 0], 1
    x, weight = dequantize_input(x), per_tensor(weight)
    y: Tensor = ipex.conv(x, weight, None, None, *window, "none", "mish", [], "")
    return y


def convolve_rows(x: Tensor, weight: Tensor) -> Tensor:
    scale, zeros = torch.full((2, 8, 7, 1), 0.02), torch.zeros(2, 8, 7, 1, dtype=torch.int64)
    words = scale, zeros, -128, 127, S8
    integers = QUANTIZED.quantize_per_token.default(x, *words)
    x = QUANTIZED.dequantize_per_token.default(integers, *words, torch.float32)
    return F.conv_transpose2d(x, per_tensor(weight), stride=2)


def convolve_wide_integers(x: Tensor, weight: Tensor) -> Tensor:
    words = 0.01, 0, -(2**15), 2**15 - 1, torch.int16
    integers = QUANTIZED.quantize_per_tensor.default(x, *words)
    x = QUANTIZED.dequantize_per_tensor.default(integers, *words)
    return F.conv_transpose2d(x, per_tensor(weight), stride=2)


Case = tuple[Callable[..., Tensor], tuple[int, ...], tuple[int, ...], str]
IMAGE, KERNEL = (2, 8, 7, 6), (8, 4, 3, 3)
REFUSED: dict[str, Case] = {
    "depth": (
        lambda x, weight: convolve_transposed(x, weight, stride=2, padding=1),
        (1, 8192, 2, 2),
        (8192, 2, 6, 6),
        "sums of so many products",
    ),
    "unary": (convolve_to_unary, IMAGE, KERNEL, "kernels have no conv+mish"),
    "long rows": (
        lambda x, weight: convolve_transposed(x, weight, groups=8),
        (2, 8, 2, 3),
        (8, 1, 1, 129),
        "rows of 128 taps",
    ),
    "scales of rows": (convolve_rows, IMAGE, KERNEL, "scales of rows"),
    "16 bits": (convolve_wide_integers, IMAGE, KERNEL, "kernels take 8-bit activations"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_ones_keep_their_graph(name: str) -> None:
    """Nothing is padded, flipped or interleaved for a kernel that does not run."""
    function, image, kernel, reason = REFUSED[name]
    gm, events = rewrite_products(function, torch.randn(image), random_weight(*kernel))
    assert [event[:2] for event in events] == [("missed", "int8 conv_transpose")]
    assert reason in events[0][2]
    ops = [node.target for node in gm.graph.nodes if node.op == "call_function"]
    assert not {aten.constant_pad_nd.default, aten.flip.default, aten.permute.default} & {*ops}
    assert {aten.convolution.default, ipex.conv.default} & {*ops}


def test_a_long_row_of_one_dimension_is_named() -> None:
    def run(x: Tensor, weight: Tensor) -> Tensor:
        return F.conv1d(dequantize_input(x), per_tensor(weight), groups=8)

    gm, events = rewrite_products(run, torch.randn(2, 8, 140), random_weight(8, 1, 129))
    reason = "kernels of depthwise convolutions have rows of 128 taps at most"
    assert events == [("missed", "int8 conv", reason)]
    assert count(gm, aten.unsqueeze.default) == 0
