"""Lowering of `ipex::streamed` (weight-stationary GEMM) to Triton, for large M."""

from collections.abc import Sequence
from typing import Any

import torch
from torch._inductor.lowering import register_lowering

from ipex_inductor.autotune.record import Problem
from ipex_inductor.lowerings.common.conv_templates import ints
from ipex_inductor.lowerings.common.templated import facts
from ipex_inductor.lowerings.gemm.rows import lower_gemm, products, sizes
from ipex_inductor.lowerings.problem import selector_hook
from ipex_inductor.lowerings.problem.workload import operands_by_name
from ipex_inductor.templates.triton import weight_stationary
from ipex_inductor.templates.triton.weight_stationary import Tile


def _lower(x: Any, weight: Any, bias: Any, tile: list[int]) -> Any:
    chosen = Tile(*tile)
    rows, columns, terms = sizes(x, weight)
    multiprocessors, shared_memory = facts(selector_hook.arch_of(x.get_device()))
    # The epilogue is not known yet, so shared memory for an addend is assumed.
    fitting = chosen.fitting(shared_memory, terms, x.get_dtype().itemsize, True)
    programs = multiprocessors * max(1, fitting)
    constants = weight_stationary.constants(
        rows, columns, terms, bias is not None, chosen, programs
    )
    return lower_gemm(
        "ipex_streamed", weight_stationary.SOURCE, chosen, (x, weight, bias), **constants
    )


def _why_not(tile: Tile, problem: Problem, rows: int) -> str | None:
    operands = operands_by_name(problem)
    columns, terms = ints(operands["weight"].shape[:2])
    if reason := why_not_streams(tile, rows, columns, [terms]):
        return reason
    itemsize = getattr(torch, operands["x"].dtype).itemsize
    _, shared_memory = facts(problem.arch)
    return why_too_few(tile, tile.fitting(shared_memory, terms, itemsize, "other" in operands))


def why_not_streams(
    tile: Tile, rows: int, columns: int, each_of_terms: Sequence[int]
) -> str | None:
    """Return why the weight-stationary template cannot be used, or None.

    Args:
        tile: tile of the template.
        rows: M.
        columns: N.
        each_of_terms: K of each GEMM that is summed up.
    """
    if rows < weight_stationary.FEWEST_ROWS:
        return "M is too small for the weight-stationary template"
    if max(each_of_terms) > weight_stationary.MOST_TERMS:
        return "K is too large to keep a block of the weight"
    return None if weight_stationary.fits(tile, columns) else "the tile does not fit"


def why_too_few(tile: Tile, programs: int) -> str | None:
    """Return why so many programs of a multiprocessor are too few, or None."""
    enough = programs * tile.num_stages >= weight_stationary.IN_FLIGHT
    return None if enough else "there is too little shared memory for enough loads in flight"


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
