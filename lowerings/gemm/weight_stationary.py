"""`ipex::streamed` to our Triton template: 1x1 convolutions and linear layers of many rows."""

from collections.abc import Sequence
from typing import Any

import torch
from torch._inductor.lowering import register_lowering

from ipex_inductor.autotune.record import Problem
from ipex_inductor.lowerings.common.conv_templates import ints
from ipex_inductor.lowerings.common.templated import facts
from ipex_inductor.lowerings.gemm.rows import lowered, products, sizes
from ipex_inductor.lowerings.problem import selector_hook
from ipex_inductor.lowerings.problem.workload import named
from ipex_inductor.templates.triton import weight_stationary
from ipex_inductor.templates.triton.weight_stationary import Tile


def _lower(x: Any, weight: Any, bias: Any, tile: list[int]) -> Any:
    chosen = Tile(*tile)
    rows, columns, terms = sizes(x, weight)
    multiprocessors, room = facts(selector_hook.arch_of(x.get_device()))
    # What Inductor will fuse is not known yet: an addend takes room.
    fitting = chosen.fitting(room, terms, x.get_dtype().itemsize, True)
    programs = multiprocessors * max(1, fitting)
    known = weight_stationary.constants(rows, columns, terms, bias is not None, chosen, programs)
    return lowered("ipex_streamed", weight_stationary.SOURCE, chosen, (x, weight, bias), **known)


def _why_not(tile: Tile, problem: Problem, rows: int) -> str | None:
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
    if rows < weight_stationary.FEWEST_ROWS:
        return "it has too few rows to stream"
    if max(each_of_terms) > weight_stationary.MOST_TERMS:
        return "it sums up too many terms to hold a block of the weight"
    return None if weight_stationary.fits(tile, columns) else "the tile does not fit"


def why_too_few(tile: Tile, programs: int) -> str | None:
    """Why so many programs of a multiprocessor are too few."""
    enough = programs * tile.num_stages >= weight_stationary.IN_FLIGHT
    return None if enough else "there is no shared memory for what should be on its way"


LINEAR_CALLS, CONV_CALLS = products(
    weight_stationary.NAME,
    weight_stationary.SOURCE,
    weight_stationary.TILES,
    torch.ops.ipex.streamed,
    _why_not,
)


def register() -> None:
    """Add the lowering to Inductor's registry."""
    register_lowering(torch.ops.ipex.streamed.default, type_promotion_kind=None)(_lower)
