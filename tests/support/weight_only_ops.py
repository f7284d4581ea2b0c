"""Operands of `ipex::weight_only_linear`, and its value in fp64."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ipex_inductor import ops  # noqa: F401  registers the ipex:: ops
from ipex_inductor.ops.quant import weight_only
from ipex_inductor.ops.quant.weight_only import COMPUTES, INTEGERS, STORED, Scheme

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
SCHEMES = [
    (name, compute)
    for name in STORED
    for compute in COMPUTES
    if compute != "int8" or name in INTEGERS
]
# Errors of sums in fp32, in parts of the sum of magnitudes: a rounding of 2^-24 for each of some
# tens of elements that a lane adds, and some for the scales.
SUMS = 2.0**-20
ROUNDINGS = {F32: 0.0, BF16: 2.0**-8, F16: 2.0**-11}  # of a result, which is rounded once


@dataclass
class Operands:
    """Arguments of a call in the order of the op."""

    x: Tensor
    weight: Tensor
    scales: Tensor
    zeros: Tensor | None
    order: Tensor | None
    bias: Tensor | None
    scheme: Scheme

    @property
    def arguments(self) -> tuple[Any, ...]:
        tensors = self.x, self.weight, self.scales, self.zeros, self.order, self.bias
        return *tensors, *self.scheme

    def by_op(self) -> Tensor:
        return torch.ops.ipex.weight_only_linear(*self.arguments)


def random_weight(name: str, rows: int, depth: int) -> Tensor:
    """Return a random stored weight; all bits occur, but NaN of FP8."""
    if name == "int8":
        return torch.randint(-128, 128, (rows, depth), dtype=torch.int8)
    if name == "fp8":
        bits = torch.randint(0, 0x7F, (rows, depth), dtype=torch.uint8)
        return (bits | torch.randint(0, 2, bits.shape, dtype=torch.uint8) << 7).view(STORED[name])
    return torch.randint(0, 256, (rows, -(-depth // 2)), dtype=torch.uint8)


def make_operands(
    rows: int,
    depth: int,
    columns: int,
    scheme: Scheme,
    *,
    dtype: torch.dtype = F32,
    scale_dtype: torch.dtype = F32,
    zeros: bool = False,
    order: bool = False,
    bias: bool = False,
) -> Operands:
    """Return random operands."""
    name, groups = scheme.weight_dtype, -(-depth // scheme.group_size)
    shape = columns, groups
    points = None
    if zeros and name in INTEGERS:
        least, most = (-128, 128) if name == "int8" else (0, 17)
        points = torch.randint(least, most, shape, dtype=INTEGERS[name])
    return Operands(
        torch.randn(rows, depth).to(dtype),
        random_weight(name, columns, depth),
        (torch.rand(shape) + 0.5).div(max(1, depth)).to(scale_dtype),
        points,
        torch.randperm(depth).int() if order else None,
        torch.randn(columns) if bias else None,
        scheme,
    )


def compute_values(o: Operands, near_tie: float = 0.0) -> list[tuple[Tensor, Tensor]]:
    """Return the values in fp64 that a kernel may have, with bounds of their errors.

    The first has the weight rounded to the compute dtype. A kernel may leave that rounding out.

    Args:
        o: operands.
        near_tie: activations so many steps from the middle of two integers may become either.
    """
    ties = torch.zeros(())
    depth, dtype = o.x.shape[-1], COMPUTES[o.scheme.compute]
    x = o.x if o.order is None else o.x[..., o.order.long()]
    weight = weight_only.dequantize_weight(o.weight, o.scales, o.zeros, o.scheme, depth).double()
    sizes = weight.abs()
    if dtype == torch.int8:
        steps, scale = weight_only.quantize_activations(x, o.scheme.group_size)
        size = o.scheme.group_size
        step = weight_only.expand_groups(scale.double(), size, depth)
        ties = step * (((x.double() / step).abs() % 1 - 0.5).abs() < near_tie)
        x = steps.double() * step
        # Kernels shift integers, and subtract what that and zero points add from the sums.
        scales = weight_only.expand_groups(o.scales.double(), size, depth)
        sizes = sizes + 256 * scales
        weights = [weight]
    else:
        x = x.to(dtype).double()
        weights = [weight.float().to(dtype).double(), weight]
    if o.scheme.weight_dtype == "nf4":  # levels may be rounded in place of what a scale makes
        scales = weight_only.expand_groups(o.scales.double(), o.scheme.group_size, depth)
        levels = torch.tensor(weight_only.NF4).to(dtype).double()
        codes = torch.stack([o.weight & 15, o.weight >> 4], -1).flatten(-2)[:, :depth]
        weights.append(levels[codes.long()] * scales)
    values = []
    for each in weights:
        value, size = x @ each.t(), x.abs() @ sizes.t()
        flips = ties @ each.abs().t() if ties.dim() else 0.0
        if o.bias is not None:
            value, size = value + o.bias.double(), size + o.bias.double().abs()
        values.append((value, SUMS * size + ROUNDINGS[o.x.dtype] * value.abs() + flips + 1e-30))
    return values


def assert_right(
    out: Tensor,
    o: Operands,
    relu: bool = False,
    cut: float = 1.0,
    roundings: int = 1,
    near_tie: float = 0.0,
) -> None:
    """Assert that a result is one of `compute_values`, and has the right type and layout.

    Args:
        out: the result.
        o: operands.
        relu: whether a ReLU followed.
        cut: how many times the bound of errors of sums is allowed.
        roundings: of the result to its dtype, each as large as that of the product's magnitudes.
        near_tie: of `compute_values`.
    """
    assert out.dtype == o.x.dtype
    assert out.shape == (*o.x.shape[:-1], o.weight.shape[0])
    assert out.is_contiguous()
    if not out.numel():
        return
    worst = []
    for value, bound in compute_values(o, near_tie):
        more = (roundings - 1) * ROUNDINGS[o.x.dtype]
        bias = 0.0 if o.bias is None else o.bias.double().abs()
        allowed = bound * cut + more * (value.abs() + bias)
        worst.append((((out.double() - (value.relu() if relu else value)).abs()) / allowed).max())
    assert min(worst) <= 1, (o.scheme, [*o.x.shape], worst)
