"""Lowering of `ipex::pipelined` (software-pipelined GEMM) to Triton: large K, no TMA stores."""

from itertools import chain
from typing import Any

import torch
from torch._inductor.lowering import register_lowering

from ipex_inductor.autotune.record import Problem
from ipex_inductor.lowerings.common.conv_templates import ints
from ipex_inductor.lowerings.common.templated import facts
from ipex_inductor.lowerings.gemm.rows import lower_gemm, products, sizes, why_too_small
from ipex_inductor.lowerings.problem.workload import operands_by_name
from ipex_inductor.templates.triton import software_pipelined
from ipex_inductor.templates.triton.software_pipelined import VECTOR, Tile


def _lower(x: Any, weight: Any, bias: Any, tile: list[int]) -> Any:
    chosen = Tile(*tile)
    constants = software_pipelined.constants(*sizes(x, weight), bias is not None, chosen)
    operands = x, weight, bias
    return lower_gemm(
        "ipex_pipelined", software_pipelined.SOURCE, chosen, operands, VECTOR, **constants
    )


def _why_not(tile: Tile, problem: Problem, rows: int) -> str | None:
    if tile not in software_pipelined.tiles(problem.arch):
        return f"the tile is not for {problem.arch}"
    operands = operands_by_name(problem)
    itemsize = getattr(torch, operands["x"].dtype).itemsize
    columns, terms = ints(operands["weight"].shape[:2])
    fewest = {
        "rows": tile.BLOCK_M,
        "columns": tile.BLOCK_N,
        "terms": software_pipelined.FEWEST_TERMS,
    }
    if reason := why_too_small(fewest, rows, columns, terms):
        return reason
    uneven = is_uneven(problem)
    if problem.arch.startswith(software_pipelined.UNEVEN) and not uneven:
        return "TMA can write its rows"
    if terms * itemsize % VECTOR:
        return "its rows are not aligned to vectors"
    lanes = 64 if problem.arch.startswith(software_pipelined.CDNA) else 32
    if "other" in operands and tile.is_full(lanes) and uneven:
        return "there are too few registers for an addend that is read element by element"
    multiprocessors, shared_memory = facts(problem.arch)
    if tile.shared(itemsize, problem.arch) > shared_memory:
        return "it exceeds the shared memory"
    blocks = rows * columns / (tile.BLOCK_M * tile.BLOCK_N)
    return None if 2 * blocks >= multiprocessors else "it has too few blocks"


def is_uneven(problem: Problem) -> bool:
    """Return whether rows of the result are no whole vectors, given static sizes."""
    weight = operands_by_name(problem)["weight"]
    return bool(int(weight.shape[0]) * getattr(torch, weight.dtype).itemsize % VECTOR)


_TILES = tuple(dict.fromkeys(chain(*software_pipelined.TILES.values())))
LINEAR_CALLS, CONV_CALLS = products(
    software_pipelined.NAME, software_pipelined.SOURCE, _TILES, torch.ops.ipex.pipelined, _why_not
)


def register() -> None:
    """Add the lowering to Inductor's registry."""
    register_lowering(torch.ops.ipex.pipelined.default, type_promotion_kind=None)(_lower)
