"""Layers between quantize and dequantize nodes, written by hand, and one net of all patterns."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ipex_inductor import compat

QUANTIZED = compat.quantized_ops()
BOUNDS = {torch.uint8: (0, 255), torch.int8: (-128, 127)}


class Quantize(nn.Module):
    """Quantizes and dequantizes an activation by one scale."""

    def __init__(self, scale: float, zero_point: int, dtype: torch.dtype = torch.uint8) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(scale), persistent=False)
        self.register_buffer("zero_point", torch.tensor(zero_point), persistent=False)
        self.words = (*BOUNDS[dtype], dtype)

    def forward(self, x: Tensor) -> Tensor:
        words = (self.scale, self.zero_point, *self.words)
        integers = QUANTIZED.quantize_per_tensor.tensor(x, *words)
        return QUANTIZED.dequantize_per_tensor.tensor(integers, *words)


class QuantizeByNumbers(Quantize):
    """The scale and the zero point are numbers of the graph, as torchao has them."""

    def __init__(self, scale: float, zero_point: int) -> None:
        super().__init__(scale, zero_point)
        self.numbers = scale, zero_point

    def forward(self, x: Tensor) -> Tensor:
        words = (*self.numbers, *self.words)
        integers = QUANTIZED.quantize_per_tensor.default(x, *words)
        return QUANTIZED.dequantize_per_tensor.default(integers, *words)


def dequantized_weight(weight: Tensor, axis: int = 0, zero_point: int = 0) -> Tensor:
    """Return a weight rounded to int8 by the scale of each channel."""
    scale = weight.abs().amax([d for d in range(weight.dim()) if d != axis]) / 127.5
    zeros = torch.zeros_like(scale, dtype=torch.int64) + zero_point
    words = scale, zeros if zero_point else torch.zeros_like(scale, dtype=torch.int64)
    integers = QUANTIZED.quantize_per_channel.default(weight, *words, axis, -128, 127, torch.int8)
    return QUANTIZED.dequantize_per_channel.default(integers, *words, axis, -128, 127, torch.int8)


class Conv(nn.Conv2d):
    """A convolution on a rounded weight."""

    def forward(self, x: Tensor) -> Tensor:
        words = self.bias, self.stride, self.padding, self.dilation, self.groups
        return F.conv2d(x, dequantized_weight(self.weight), *words)


class Linear(nn.Linear):
    """A linear layer on a rounded weight."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, dequantized_weight(self.weight), self.bias)


class Net(nn.Module):
    """A function of modules, and of inputs."""

    def __init__(self, function: Callable[..., Any], *layers: nn.Module) -> None:
        super().__init__()
        self.function, self.layers = function, nn.ModuleList(layers)

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*self.layers, *inputs)


@dataclass(frozen=True)
class Pattern:
    """A row of the table: the layer, what follows it, and the subjects that the pass reports.

    `addend` is "" or "float", or "int8" for a dequantized one.
    """

    name: str
    layer: Callable[[], nn.Module]
    follow: Callable[..., Tensor] = lambda value: value
    addend: str = ""
    pooled: bool = False

    @property
    def is_conv(self) -> bool:
        return self.name.startswith("conv")


def _conv(**options: Any) -> nn.Module:
    return Conv(8, 8, 3, padding=1, **options)


def _linear() -> nn.Module:
    return Linear(40, 24)


PATTERNS = [
    Pattern("conv", _conv),
    Pattern("conv 1x1", lambda: Conv(8, 12, 1, bias=False)),
    Pattern("conv strided", lambda: Conv(8, 12, (3, 2), (2, 1), (0, 1), (1, 2))),
    Pattern("conv in groups", lambda: _conv(groups=2)),
    Pattern("conv depthwise", lambda: _conv(groups=8), F.relu6),
    Pattern("conv pooled", _conv, pooled=True),
    Pattern("conv+relu", _conv, F.relu),
    Pattern("conv+add", _conv, torch.add, "float"),
    Pattern("conv+add of int8", _conv, torch.add, "int8"),
    Pattern("conv+add+relu", _conv, lambda v, o: F.relu(v + o), "float"),
    Pattern("conv+add+relu of int8", _conv, lambda v, o: F.relu(o + v), "int8"),
    Pattern("linear", _linear),
    Pattern("linear+relu", _linear, F.relu),
    Pattern("linear+gelu", _linear, F.gelu),
    Pattern("linear+gelu_tanh", _linear, lambda v: F.gelu(v, approximate="tanh")),
    Pattern("linear+sigmoid", _linear, F.sigmoid),
    Pattern("linear+add", _linear, torch.add, "float"),
]


def subject_of(pattern: Pattern, quantized: bool, bf16: bool) -> str:
    """Return what the pass reports about a pattern."""
    name = pattern.name.removesuffix(" of int8").partition(" ")[0]
    name = {"conv depthwise": "conv+hardtanh"}.get(pattern.name, name)
    if bf16 and pattern.addend == "int8":
        # The product is bf16 and the dequantized addend fp32: rules do not fuse their sum.
        return "int8 conv"
    return f"int8 {name}" + "+quantize" * quantized


class Branch(nn.Module):
    """One pattern: a quantized input, the layer, and a quantized result if `quantized`."""

    def __init__(self, pattern: Pattern, quantized: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.pattern, self.quantized = pattern, quantized
        middle = 0 if dtype == torch.int8 else 117
        self.input = Quantize(0.025, middle, dtype)
        # No multiple of 1/256, of which addends in bf16 would be ties.
        self.addend = Quantize(0.030127, middle + 3, dtype)
        self.layer = pattern.layer()
        zero_point = 10 if dtype == torch.uint8 and "relu" in pattern.name else middle
        self.result = Quantize(0.02, zero_point, dtype)

    def product(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the result before it is quantized."""
        x = self.input(x)
        if self.pattern.pooled:
            x = F.max_pool2d(x, 3, 2, 1)
        value = self.layer(x)
        others = {"": [], "float": [y], "int8": [self.addend(y)]}[self.pattern.addend]
        return self.pattern.follow(value, *others)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        value = self.product(x, y)
        return self.result(value) if self.quantized else value


class AllPatterns(nn.Module):
    """Every pattern beside the others, with float and int8 results; types of integers by turns."""

    def __init__(self) -> None:
        super().__init__()
        pairs = [(p, q) for p in PATTERNS for q in (False, True)]
        types = torch.uint8, torch.int8
        branches = [Branch(p, q, types[i // 2 % 2]) for i, (p, q) in enumerate(pairs)]
        self.branches = nn.ModuleList(branches)

    def forward(self, images: Tensor, others: Tensor, rows: Tensor, sums: Tensor) -> list[Tensor]:
        """images and others [B, 8, 9, 10], rows [B, 5, 40], sums [B, 5, 24]."""
        given = {True: (images, others), False: (rows, sums)}
        return [branch(*given[branch.pattern.is_conv]) for branch in self.branches]


def make_inputs(batch: int, bf16: bool = False) -> tuple[Tensor, ...]:
    """Return inputs of `AllPatterns`; addends in bf16 where layers have results in it."""
    shapes = ((batch, 8, 9, 10), (batch, 8, 9, 10), (batch, 5, 40), (batch, 5, 24))
    values = [torch.randn(shape) for shape in shapes]
    return tuple(v.bfloat16() if bf16 and i % 2 else v for i, v in enumerate(values))
