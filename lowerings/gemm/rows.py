"""Linear layers and convolutions of single pixels as products of rows, by templates of ours."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._inductor import ir

from ipex_inductor.autotune.record import Problem
from ipex_inductor.lowerings.common.calls import Call, is_channels_last, why_odd
from ipex_inductor.lowerings.common.conv_templates import (
    NO_TF32,
    ints,
    is_product,
    why_not_ours,
    with_epilogue,
)
from ipex_inductor.lowerings.common.templated import (
    aligned,
    behind_rows,
    calls,
    dense,
    in_turns,
    node,
    template,
)
from ipex_inductor.lowerings.problem.workload import empty, named
from ipex_inductor.ops.stem import rows_of


def products(
    name: str,
    source: str,
    tiles: Sequence[Any],
    op: Callable[..., Tensor],
    why_not: Callable[[Any, Problem, int], str | None],
) -> tuple[tuple[Call, ...], tuple[Call, ...]]:
    """Calls of `op` for linear layers, and for convolutions; `why_not` is told how many rows."""

    def why_not_layer(tile: Any, problem: Problem) -> str | None:
        return why_no_layer(problem) or why_not(tile, problem, rows_of_layer(problem))

    def why_not_pixels(tile: Any, problem: Problem) -> str | None:
        return why_no_pixels(problem) or why_not(tile, problem, rows_of_image(problem))

    return (
        calls(name, source, tiles, partial(_linear, op), why_not_layer),
        calls(name, source, tiles, partial(_conv, op), why_not_pixels),
    )


def lowered(
    name: str, source: str, tile: Any, operands: Sequence[Any], vector: int = 1, **constants: Any
) -> Any:
    """The template on matrices of Inductor's, the second of which is turned, and a bias or None.

    They begin at multiples of `vector` bytes.
    """
    given = [aligned(dense(each), vector) for each in operands if each is not None]
    size = [constants["ROWS"], constants["COLUMNS"]]
    return node(
        template(name, source, in_turns),
        given,
        ir.FixedLayout(given[0].get_device(), torch.float32, size),
        tile.num_warps,
        tile.num_stages,
        ALLOW_TF32=False,
        **constants,
    )


def sizes(x: Any, weight: Any) -> tuple[int, int, int]:
    """Rows, columns and terms of a product of Inductor's."""
    (rows, terms), (columns, _) = ints(x.get_size()), ints(weight.get_size())
    return rows, columns, terms


def why_too_small(fewest: Mapping[str, int], rows: int, columns: int, terms: int) -> str | None:
    """Why it is too small where there must be so many of each."""
    found = {"rows": rows, "columns": columns, "terms": terms}
    few = [name for name, least in fewest.items() if found[name] < least]
    return f"it has too few {' and '.join(few)}" if few else None


def _linear(
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


def _conv(
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
    if not problem.arch.startswith(("sm_", "gfx")):
        return f"our templates are not for {problem.arch}"
    if (reason := why_odd(problem)) is not None:
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
