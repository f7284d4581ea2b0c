"""`ipex::gated_linear`: both products of a pair in one kernel of ours, where that is faster.

Else they are one product of a library, on weights side by side, with Inductor's kernel behind it.
"""

from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor
from torch._inductor import ir
from torch._inductor.lowering import register_lowering

from ipex_inductor.autotune.record import Problem
from ipex_inductor.lowerings.common.calls import Call, always
from ipex_inductor.lowerings.common.conv_templates import ints
from ipex_inductor.lowerings.common.templated import (
    aligned,
    calls,
    dense,
    facts,
    in_turns,
    node,
    template,
)
from ipex_inductor.lowerings.gemm.rows import rows_of_layer, sizes, why_no_layer, why_too_small
from ipex_inductor.lowerings.problem import selector_hook
from ipex_inductor.lowerings.problem.workload import named
from ipex_inductor.ops.gated import reference
from ipex_inductor.templates.triton import glu
from ipex_inductor.templates.triton.glu import Tile
from ipex_inductor.templates.triton.persistent import FEWEST, VECTOR


def _why_not(tile: Tile, problem: Problem) -> str | None:
    if not problem.arch.startswith("sm_90"):
        return "it is for Hopper's copy engine"
    if reason := why_no_layer(problem):
        return reason
    operands = named(problem)
    if problem.constants["unary"] not in glu.UNARY:
        return "the template has no such activation"
    if ("bias" in operands) != ("gate_bias" in operands):
        return "one layer alone has a bias"
    if operands["gate"] != operands["weight"]:
        return "both weights are not alike"
    columns, terms = ints(operands["weight"].shape)
    fewest = {**FEWEST, "columns": tile.BLOCK_N}
    if reason := why_too_small(fewest, rows_of_layer(problem), columns, terms):
        return reason
    if terms * getattr(torch, operands["x"].dtype).itemsize % VECTOR:
        return "its rows do not begin where the copy engine does"
    return None


def _gated(
    tile: Tile,
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    gate_bias: Tensor | None,
    bias: Tensor | None,
    unary: str,
) -> Tensor:
    """By the template, of unrounded sums; the result is rounded once."""
    factors = x.reshape(-1, x.shape[-1]), gate, weight, gate_bias, bias
    made = torch.ops.ipex.gated_rows(*factors, unary, [*astuple(tile)])
    result: Tensor = made.to(x.dtype).view(*x.shape[:-1], -1)
    return result


def _lower(
    x: Any, gate: Any, weight: Any, gate_bias: Any, bias: Any, unary: str, tile: list[int]
) -> Any:
    chosen = Tile(*tile)
    multiprocessors, room = facts(selector_hook.arch_of(x.get_device()))
    programs = multiprocessors * max(1, room // chosen.shared(x.get_dtype().itemsize))
    rows, columns, terms = sizes(x, weight)
    tensors = (t for t in (x, gate, weight, gate_bias, bias) if t is not None)
    return node(
        template("ipex_gated", glu.SOURCE, in_turns),
        [aligned(dense(each), VECTOR) for each in tensors],
        ir.FixedLayout(x.get_device(), torch.float32, [rows, columns]),
        chosen.num_warps,
        chosen.num_stages,
        ALLOW_TF32=False,
        **glu.constants(rows, columns, terms, bias is not None, unary, chosen, programs),
    )


# The first is what Inductor does.
CALLS = (
    Call("aten.addmm", reference, always),
    *calls(glu.NAME, glu.SOURCE, glu.TILES, _gated, _why_not),
)


def register() -> None:
    """Add the lowering to Inductor's registry."""
    register_lowering(torch.ops.ipex.gated_rows.default, type_promotion_kind=None)(_lower)
