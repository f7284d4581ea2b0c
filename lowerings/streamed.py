"""`ipex::streamed` to our Triton template: 1x1 convolutions and linear layers of many rows."""

import math
from collections.abc import Callable, Sequence
from dataclasses import astuple
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._inductor import ir
from torch._inductor.lowering import register_lowering

from ipex_inductor.autotune.record import Problem
from ipex_inductor.lowerings import listed
from ipex_inductor.lowerings.calls import is_channels_last, why_not
from ipex_inductor.lowerings.conv_templates import (
    NO_TF32,
    ints,
    is_product,
    why_not_ours,
    with_epilogue,
)
from ipex_inductor.lowerings.templated import (
    behind_rows,
    calls,
    dense,
    facts,
    in_turns,
    node,
    template,
)
from ipex_inductor.lowerings.workload import empty, named
from ipex_inductor.ops.stem import rows_of
from ipex_inductor.templates import streamed
from ipex_inductor.templates.streamed import Tile


def _lower(x: Any, weight: Any, bias: Any, tile: list[int]) -> Any:
    chosen = Tile(*tile)
    given = [dense(each) for each in (x, weight, bias) if each is not None]
    (rows, terms), (columns, _) = ([int(n) for n in t.get_size()] for t in given[:2])
    multiprocessors, room = facts(listed.arch_of(x.get_device()))
    # What Inductor will fuse is not known yet: an addend takes room.
    fitting = chosen.fitting(room, terms, x.get_dtype().itemsize, True)
    programs = multiprocessors * max(1, fitting)
    return node(
        template("ipex_streamed", streamed.SOURCE, in_turns),
        given,
        ir.FixedLayout(x.get_device(), torch.float32, [rows, columns]),
        chosen.num_warps,
        chosen.num_stages,
        ALLOW_TF32=False,
        **streamed.constants(rows, columns, terms, bias is not None, chosen, programs),
    )


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


def _why_not_linear(tile: Tile, problem: Problem) -> str | None:
    return why_no_layer(problem) or _why_not_product(tile, problem, rows_of_layer(problem))


def _why_not_conv(tile: Tile, problem: Problem) -> str | None:
    return why_no_pixels(problem) or _why_not_product(tile, problem, rows_of_image(problem))


def _why_not_product(tile: Tile, problem: Problem, rows: int) -> str | None:
    operands = named(problem)
    columns, terms = ints(operands["weight"].shape[:2])
    if reason := why_not_streams(tile, rows, columns, [terms]):
        return reason
    itemsize = getattr(torch, operands["x"].dtype).itemsize
    _, room = facts(problem.arch)
    return why_too_few(tile, tile.fitting(room, terms, itemsize, "other" in operands))


def why_not_streams(
    tile: Tile, rows: int, columns: int, each_of_terms: Sequence[int]
) -> str | None:
    """Why rows of so many columns are not streamed, summed up from products of so many terms."""
    if rows < streamed.FEWEST_ROWS:
        return "it has too few rows to stream"
    if max(each_of_terms) > streamed.MOST_TERMS:
        return "it sums up too many terms to hold a block of the weight"
    return None if streamed.fits(tile, columns) else "the tile does not fit"


def why_too_few(tile: Tile, programs: int) -> str | None:
    """Why so many programs of a multiprocessor are too few."""
    enough = programs * tile.num_stages >= streamed.IN_FLIGHT
    return None if enough else "there is no shared memory for what should be on its way"


_STREAMED = streamed.NAME, streamed.SOURCE, streamed.TILES
LINEAR_CALLS = calls(*_STREAMED, partial(linear, torch.ops.ipex.streamed), _why_not_linear)
CONV_CALLS = calls(*_STREAMED, partial(conv, torch.ops.ipex.streamed), _why_not_conv)


def register() -> None:
    """Add the lowering to Inductor's registry."""
    register_lowering(torch.ops.ipex.streamed.default, type_promotion_kind=None)(_lower)
