"""Lowering of `ipex::persistent` (persistent GEMM) to our Triton template, for large K."""

from typing import Any

import torch
from torch._inductor.lowering import register_lowering

from ipex_inductor.autotune.record import Problem
from ipex_inductor.lowerings.common.conv_templates import ints
from ipex_inductor.lowerings.common.templated import facts
from ipex_inductor.lowerings.gemm.rows import lower_gemm, products, sizes, why_too_small
from ipex_inductor.lowerings.problem import selector_hook
from ipex_inductor.lowerings.problem.workload import operands_by_name
from ipex_inductor.templates.triton import persistent
from ipex_inductor.templates.triton.persistent import VECTOR, Tile


def _lower(x: Any, weight: Any, bias: Any, tile: list[int]) -> Any:
    chosen = Tile(*tile)
    multiprocessors, shared_memory = facts(selector_hook.arch_of(x.get_device()))
    programs = multiprocessors * max(1, shared_memory // chosen.shared(x.get_dtype().itemsize))
    constants = persistent.constants(*sizes(x, weight), bias is not None, chosen, programs)
    operands = x, weight, bias
    return lower_gemm("ipex_persistent", persistent.SOURCE, chosen, operands, VECTOR, **constants)


def _why_not(tile: Tile, problem: Problem, rows: int) -> str | None:
    if not problem.arch.startswith("sm_90"):
        return "it is for Hopper's copy engine"
    operands = operands_by_name(problem)
    if "other" in operands and tile.BLOCK_M * tile.BLOCK_N > persistent.MOST_ADDED:
        return "there are too few registers for an addend"
    columns, terms = ints(operands["weight"].shape[:2])
    fewest = {**persistent.FEWEST, "columns": tile.BLOCK_N}
    if reason := why_too_small(fewest, rows, columns, terms):
        return reason
    if terms * getattr(torch, operands["x"].dtype).itemsize % VECTOR:
        return "its rows are not aligned for TMA"
    return None


LINEAR_CALLS, CONV_CALLS = products(
    persistent.NAME, persistent.SOURCE, persistent.TILES, torch.ops.ipex.persistent, _why_not
)


def register() -> None:
    """Add the lowering to Inductor's registry."""
    register_lowering(torch.ops.ipex.persistent.default, type_promotion_kind=None)(_lower)
