"""Operands of the int8 ops, and their results by the ops' reference and by the kernels."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ipex_inductor import ops  # noqa: F401  registers the ipex:: ops
from ipex_inductor.ops.conv.conv import CHANNELS_LAST
from ipex_inductor.ops.quant.int8_operands import INTEGERS, SHIFT
from ipex_inductor.templates.cpu import int8

ipex = torch.ops.ipex
U8, S8, F32, BF16 = torch.uint8, torch.int8, torch.float32, torch.bfloat16
BOUNDS = {U8: (0, 255), S8: (-128, 127)}
ZERO_POINTS = {U8: 37, S8: -5}
X_SCALE, OTHER_SCALE, OTHER_ZERO_POINT = 0.02, 0.015, 11
RESULT_ZERO_POINTS = {U8: 100, S8: 3}


@dataclass(frozen=True)
class Case:
    """A problem of the kernel; `window` is empty for a linear layer.

    `x` and `weight` are shapes, `window` is stride, padding, dilation and groups.
    """

    x: tuple[int, ...]
    weight: tuple[int, ...]
    window: tuple[Any, ...] = ()
    x_dtype: torch.dtype = U8
    dtype: torch.dtype = U8
    other: torch.dtype | None = None
    binary: str = "none"
    unary: str = "none"
    scalars: tuple[float, ...] = ()
    bias: float = 0.0  # added to each element of the bias
    spread: float = 2.5  # about the standard deviation of results
    by_row: bool = False  # rows of x have scales of their own, and no zero point
    weight_zeros: int = 0  # the largest zero point of the weight; 0: it has none

    @property
    def groups(self) -> int:
        return self.window[3] if self.window else 1

    def __str__(self) -> str:
        rows = ["by_row"] * self.by_row + ["zeros"] * bool(self.weight_zeros)
        names = [str(d).removeprefix("torch.") for d in (self.x_dtype, self.dtype, self.other) if d]
        words = [w for w in (self.binary, self.unary) if w != "none"]
        sizes = ["x".join(map(str, self.x)), "x".join(map(str, self.weight))]
        return "-".join([*sizes, *map(str, self.window), *names, *words, *rows]).replace(" ", "")


@dataclass
class Operands:
    """Tensors and words of a call; `plain` is the weight before it is arranged."""

    case: Case
    x: Tensor
    plain: Tensor
    weight_scale: Tensor
    bias: Tensor
    x_zero_point: Tensor
    result_scale: float
    x_scale: float = X_SCALE
    other: Tensor | None = None
    row_scales: Tensor | None = None
    weight_zero_point: Tensor | None = None
    weight: Tensor = field(init=False)
    factors: Tensor = field(init=False)
    scales: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.arrange()

    def arrange(self) -> None:
        """Compute what the kernel reads from the weight and the scales."""
        case = self.case
        self.weight = ipex.int8_weight(self.plain, case.groups)
        shift = SHIFT if case.x_dtype == S8 else 0
        own = self.plain, self.weight_scale
        of_x = torch.tensor(self.x_scale), self.x_zero_point
        self.factors = (
            ipex.int8_row_factors(*own, self.bias)
            if case.by_row
            else ipex.int8_factors(
                *of_x, *own, self.weight_zero_point, self.bias, shift, case.groups, []
            )
        )
        others = torch.tensor(OTHER_SCALE), torch.tensor(OTHER_ZERO_POINT)
        result = (
            torch.tensor(self.result_scale),
            torch.tensor(RESULT_ZERO_POINTS.get(case.dtype, 0)),
        )
        bounds = BOUNDS.get(case.dtype, (0, 0))
        self.scales = ipex.int8_scales(self.x_zero_point, *others, *result, *bounds)

    @property
    def window(self) -> tuple[Any, ...]:
        """Size of the kernel, stride, padding, dilation and groups; nothing for a linear layer."""
        case = self.case
        return (case.weight[2:], *case.window) if case.window else ()

    def by_reference(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the result of the op."""
        case = self.case
        words = case.binary, case.unary, list(case.scalars), dtype or case.dtype
        tensors = self.x, self.weight, self.factors, self.scales, self.other
        if not case.window:
            return ipex.int8_linear(*tensors, self.row_scales, *words)
        window = [list(w) if isinstance(w, tuple) else w for w in self.window]
        return ipex.int8_conv(*tensors, *window, *words)

    def in_kernels_layout(self, result: Tensor) -> Tensor:
        """Return a result in the layout that the kernel writes."""
        return as_images(result) if self.case.window else result

    def by_kernel(self, out: Tensor) -> Tensor:
        """Return `out`, written by the kernel."""
        case = self.case
        given = self.other, self.row_scales
        others = [tensor for tensor in given if tensor is not None]
        numbers = int8.BINARY.index(case.binary), int8.UNARY.index(case.unary)
        tensors = self.x, self.weight, self.factors, self.scales, *others
        are_given = [tensor is not None for tensor in given]
        int8.call(*tensors, *are_given, self.window, *numbers, case.scalars, out=out)
        return out


def random_integers(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return integers of the whole range."""
    least, most = BOUNDS[dtype]
    return torch.randint(least, most + 1, shape, dtype=dtype)


def as_images(value: Tensor) -> Tensor:
    """Return a tensor of the same elements, channels-last if it has an image's dimensions."""
    last = CHANNELS_LAST.get(value.dim())
    return value if last is None else value.contiguous(memory_format=last)


def make_operands(case: Case, seed: int = 0) -> Operands:
    """Return random operands of a case, the same for each seed."""
    torch.manual_seed(seed)
    images = as_images if case.window else (lambda value: value)
    depth = max(1, torch.Size(case.weight[1:]).numel())
    # Elements of x are about 74 from their mean, those of the weight about 74 from zero.
    unit = case.spread / (X_SCALE * 74 * 74 * depth**0.5)
    operands = Operands(
        case,
        x=images(random_integers(case.x, case.x_dtype)),
        plain=random_integers(case.weight, S8),
        weight_scale=(0.5 + torch.rand(case.weight[0])) * unit,
        bias=torch.randn(case.weight[0]) + case.bias,
        x_zero_point=torch.tensor(0 if case.by_row else ZERO_POINTS[case.x_dtype]),
        result_scale=0.03,
    )
    if case.by_row:
        operands.row_scales = X_SCALE * (0.1 + torch.rand(*case.x[:-1], 1))
    if case.weight_zeros:
        bound = case.weight_zeros
        zeros = torch.randint(-bound, bound + 1, case.weight[:1])
        operands.weight_zero_point = zeros
        operands.arrange()
    if case.other:
        operands.other = images(_addend(_result_shape(operands), case.other))
    return operands


def _result_shape(operands: Operands) -> tuple[int, ...]:
    case = operands.case
    if not case.window:
        return (*case.x[:-1], case.weight[0])
    with torch._subclasses.FakeTensorMode() as mode:
        x, weight = (mode.from_tensor(t).float() for t in (operands.x, operands.plain))
        stride, padding, dilation, groups = case.window
        zeros = (0,) * len(stride)
        convolve = torch.convolution
        return tuple(
            convolve(x, weight, None, stride, padding, dilation, False, zeros, groups).shape
        )


def _addend(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return random_integers(shape, dtype) if dtype in INTEGERS else torch.randn(shape).to(dtype)
