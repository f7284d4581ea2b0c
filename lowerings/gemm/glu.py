"""Lowering of `ipex::gated_linear` (GLU) to one kernel for both GEMMs, where that is faster.

Otherwise a library computes one GEMM on concatenated weights, followed by Inductor's kernel.
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
    align_to_vector,
    calls,
    dense,
    facts,
    in_turns,
    node,
    template,
)
from ipex_inductor.lowerings.gemm.rows import rows_of_layer, sizes, why_no_layer, why_too_small
from ipex_inductor.lowerings.problem import selector_hook
from ipex_inductor.lowerings.problem.workload import operands_by_name
from ipex_inductor.ops.gemm.glu import reference
from ipex_inductor.templates.triton import glu
from ipex_inductor.templates.triton.glu import Tile
from ipex_inductor.templates.triton.persistent import FEWEST, VECTOR


def _why_not(tile: Tile, problem: Problem) -> str | None:
    if not problem.arch.startswith("sm_90"):
        return "it is for Hopper's copy engine"
    if reason := why_no_layer(problem):
        return reason
    operands = operands_by_name(problem)
    if problem.constants["unary"] not in glu.UNARY:
        return "the template has no such activation"
    if ("bias" in operands) != ("gate_bias" in operands):
        return "only one of the layers has a bias"
    if operands["gate"] != operands["weight"]:
        return "its weights differ in shape, layout or dtype"
    columns, terms = ints(operands["weight"].shape)
    fewest = {**FEWEST, "columns": tile.BLOCK_N}
    if reason := why_too_small(fewest, rows_of_layer(problem), columns, terms):
        return reason
    if terms * getattr(torch, operands["x"].dtype).itemsize % VECTOR:
        return "its rows are not aligned for TMA"
    return None


def _run_glu(
    tile: Tile,
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    gate_bias: Tensor | None,
    bias: Tensor | None,
    unary: str,
) -> Tensor:
    """Compute the GLU by the template from unrounded sums; the result is rounded once.

    Args:
        tile: tile of the template.
        x: activation [..., K].
        gate: weight of the gate, [N, K].
        weight: weight of the other GEMM, [N, K].
        gate_bias: bias of the gate, [N], or None.
        bias: bias of the other GEMM, [N], or None.
        unary: activation function of the gate.
    """
    factors = x.reshape(-1, x.shape[-1]), gate, weight, gate_bias, bias
    rows = torch.ops.ipex.gated_rows(*factors, unary, [*astuple(tile)])
    result: Tensor = rows.to(x.dtype).view(*x.shape[:-1], -1)
    return result


def _lower(
    x: Any, gate: Any, weight: Any, gate_bias: Any, bias: Any, unary: str, tile: list[int]
) -> Any:
    chosen = Tile(*tile)
    multiprocessors, shared_memory = facts(selector_hook.arch_of(x.get_device()))
    programs = multiprocessors * max(1, shared_memory // chosen.shared(x.get_dtype().itemsize))
    rows, columns, terms = sizes(x, weight)
    tensors = (t for t in (x, gate, weight, gate_bias, bias) if t is not None)
    return node(
        template("ipex_gated", glu.SOURCE, in_turns),
        [align_to_vector(dense(tensor), VECTOR) for tensor in tensors],
        ir.FixedLayout(x.get_device(), torch.float32, [rows, columns]),
        chosen.num_warps,
        chosen.num_stages,
        ALLOW_TF32=False,
        **glu.constants(rows, columns, terms, bias is not None, unary, chosen, programs),
    )


# The first is Inductor's default.
CALLS = (
    Call("aten.addmm", reference, always),
    *calls(glu.NAME, glu.SOURCE, glu.TILES, _run_glu, _why_not),
)


def register() -> None:
    """Add the lowering to Inductor's registry."""
    register_lowering(torch.ops.ipex.gated_rows.default, type_promotion_kind=None)(_lower)
