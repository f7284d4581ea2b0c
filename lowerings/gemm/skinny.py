"""Lowering of `ipex::few_rows` (skinny GEMM) to a Triton template, which fuses the epilogue."""

import functools
import math
from typing import Any

import torch
from torch import Tensor
from torch._inductor import ir
from torch._inductor.lowering import register_lowering

from ipex_inductor.aot_cache.digest import digest_fields
from ipex_inductor.autotune.record import Problem
from ipex_inductor.lowerings.common.calls import Call, why_odd
from ipex_inductor.lowerings.common.templated import (
    apply_epilogue_to_rows,
    facts,
    is_xe,
    node,
    template,
    why_no_product,
)
from ipex_inductor.lowerings.problem.workload import operands_by_name
from ipex_inductor.ops.gemm.linear import LinearArgs
from ipex_inductor.templates.triton.skinny import (
    MOST,
    NAME,
    NOT_XE,
    Tile,
    inductor_source,
    tiles,
)

# Programs per multiprocessor. With fewer than LEAST, multiprocessors idle. If half as many parts
# already give more than ENOUGH, rows of the weight are not divided further.
LEAST, ENOUGH = 0.75, 1.0


def _grid(rows: Any, columns: Any, meta: Any, *, cdiv: Any) -> tuple[Any, Any, int]:
    return cdiv(columns, meta["BLOCK_N"]), meta["PARTS"], 1


def _template(one_row: bool, how: Tile) -> Any:
    name = "ipex_one_row" if one_row else "ipex_few_rows"
    name += "_joined" * how.joined
    return template(name, inductor_source(one_row, how), _grid)


def _few_rows(x: Any, weight: Any, terms: int, tile: list[int]) -> Any:
    how = Tile._make(tile)
    x, weight = map(ir.ExternKernel.realize_input, (x, weight))
    # The layout of a computed weight is not fixed yet.
    weight = ir.ExternKernel.require_stride_order(weight, [1, 0])
    rows, size = (int(n) for n in x.get_size())
    columns = int(weight.get_size()[0])
    parts = how.parts if how.joined else -(-size // terms)
    return node(
        _template(rows == 1, how),
        (x, weight),
        ir.FixedLayout(
            x.get_device(), torch.float32, [rows if how.joined else parts * rows, columns]
        ),
        how.warps,
        how.stages,
        workspace=how.workspace(rows, columns) if how.joined else 0,
        PARTS=parts,
        **how.parameters(rows, size, x.get_dtype().itemsize),
    )


def _run_skinny(tile: Tile, *args: Any) -> Tensor:
    """Compute a skinny GEMM; its epilogue uses unrounded sums, and the result is rounded once.

    Args:
        tile: tile of the template.
        args: arguments of `ipex::linear`.
    """
    call = LinearArgs(*args)
    rows = call.x.reshape(-1, call.x.shape[-1])
    terms = rows.shape[1] if tile.joined else tile.terms(rows.shape[1], call.x.element_size())
    sums = torch.ops.ipex.few_rows(rows, call.weight, terms, [int(n) for n in tile])
    if sums.shape[0] != rows.shape[0]:
        sums = sums.view(-1, rows.shape[0], sums.shape[1]).sum(0)
    if call.bias is not None:
        sums = sums + call.bias
    return apply_epilogue_to_rows(sums, call.x, call.other, *call.epilogue())


def _why_not(tile: Tile, one_row: bool, problem: Problem) -> str | None:
    reason = why_odd(problem)
    if reason is not None:
        return reason
    if not problem.arch.startswith(("sm_", "xe:")):
        return f"our template is not for {problem.arch}"
    if is_xe(problem.arch) and tile._replace(parts=1) in NOT_XE:
        return "the tile is not for Intel's GPUs"
    if tile.joined and not problem.arch.startswith("sm_"):
        return f"joined parts of K were not measured on {problem.arch} yet"
    operands = operands_by_name(problem)
    x, weight = operands["x"], operands["weight"]
    no_product = None if one_row else why_no_product(problem.arch, x.dtype)
    if no_product is not None:
        return no_product
    rows, columns, size = (
        math.prod(map(int, x.shape[:-1])),
        *(int(n) for n in weight.shape),
    )
    if rows > MOST or (rows == 1) != one_row:
        return f"it has {rows} rows"
    if weight.stride[1] != 1:
        return "the rows of its weight are not contiguous"
    if size * int(x.stride[-1]) >= 2**31:
        return "the elements of a row are too far apart"
    itemsize = getattr(torch, x.dtype).itemsize
    count, shared_memory = facts(problem.arch)
    if tile.shared(rows, itemsize) > shared_memory:
        return "its stages exceed the shared memory"
    terms = tile.terms(size, itemsize)
    programs = -(-columns // tile.columns) * -(-size // terms)
    if programs < LEAST * count or (tile.parts > 1 and programs > 2 * ENOUGH * count):
        return f"{programs} programs do not suit {count} multiprocessors"
    steps = terms * itemsize // tile.step
    if -(-size // terms) != tile.parts or (tile.parts > 1 and steps < 2) or terms >= 2 * size:
        return "the rows of its weight are too short"
    return None


CALLS = tuple(
    Call(
        NAME,
        functools.partial(_run_skinny, tile),
        functools.partial(_why_not, tile, one_row),
        parameters=tile.fields(),
        version=digest_fields({"source": inductor_source(one_row, tile)})[:12],
    )
    for one_row in (True, False)
    for tile in tiles(one_row)
)


def register() -> None:
    """Add the lowering to Inductor's registry."""
    register_lowering(torch.ops.ipex.few_rows.default, type_promotion_kind=None)(_few_rows)
