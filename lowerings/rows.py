"""Linear layers and convolutions of single pixels as products of rows, by templates of ours."""

import math
from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor

from ipex_inductor.autotune.record import Problem
from ipex_inductor.lowerings.calls import is_channels_last, why_not
from ipex_inductor.lowerings.conv_templates import (
    NO_TF32,
    ints,
    is_product,
    why_not_ours,
    with_epilogue,
)
from ipex_inductor.lowerings.templated import behind_rows
from ipex_inductor.lowerings.workload import empty, named
from ipex_inductor.ops.stem import rows_of


def linear(
    op: Callable[..., Tensor],
    tile: Any,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    other: Tensor | None,
    binary: str,
    unary: str,
    scalars: list[float],
    packed: bool,
) -> Tensor:
    """By `op`, a product of rows. The epilogue is of unrounded sums; the result is rounded once."""
    sums = op(x.reshape(-1, x.shape[-1]), weight, bias, [*astuple(tile)])
    return behind_rows(sums, x, other, binary, unary, scalars)


def conv(
    op: Callable[..., Tensor],
    tile: Any,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    other: Tensor | None,
    *rest: Any,
) -> Tensor:
    """Of channels-last images, whose rows are those of a matrix: views but for the kernel."""
    sums = op(rows_of(x), weight.flatten(1), bias, [*astuple(tile)])
    return with_epilogue(sums, x, x.shape[2:], None, other, *rest)


def why_no_layer(problem: Problem) -> str | None:
    """Why a linear layer is no product of rows for a template."""
    operands = named(problem)
    if (reason := why_not(problem)) is not None:
        return reason
    if operands["x"].dtype == "float32":
        return NO_TF32
    factors = (empty(operands[name], torch.device("meta")) for name in ("x", "weight"))
    contiguous = all(factor.is_contiguous() for factor in factors)
    return None if contiguous else "its factors are not contiguous"


def why_no_pixels(problem: Problem) -> str | None:
    """Why a convolution is no product of rows for a template."""
    x = named(problem)["x"]
    if (reason := why_not_ours(problem)) is not None:
        return reason
    if x.dtype == "float32":
        return NO_TF32
    if not is_product(problem):
        return "its window is more than one pixel"
    return None if is_channels_last(x) else "its input is not channels-last"


def rows_of_layer(problem: Problem) -> int:
    """How many rows the matrix of a linear layer has."""
    return math.prod(ints(named(problem)["x"].shape[:-1]))


def rows_of_image(problem: Problem) -> int:
    """How many rows the matrix of a convolution of single pixels has."""
    batch, _, *image = ints(named(problem)["x"].shape)
    return batch * math.prod(image)
