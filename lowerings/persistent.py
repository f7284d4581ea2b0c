"""`ipex::persistent` to our Triton template: linear layers that are bound by arithmetic."""

import math
from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor
from torch._inductor import ir
from torch._inductor.lowering import register_lowering

from ipex_inductor.autotune.record import Problem
from ipex_inductor.lowerings import listed
from ipex_inductor.lowerings.calls import why_not
from ipex_inductor.lowerings.conv_templates import NO_TF32, ints
from ipex_inductor.lowerings.templated import (
    aligned,
    behind_rows,
    calls,
    dense,
    facts,
    in_turns,
    node,
    template,
)
from ipex_inductor.lowerings.workload import empty, named
from ipex_inductor.templates import persistent
from ipex_inductor.templates.persistent import Tile


def _lower(x: Any, weight: Any, bias: Any, tile: list[int]) -> Any:
    chosen = Tile(*tile)
    given = [
        aligned(dense(each), persistent.VECTOR) for each in (x, weight, bias) if each is not None
    ]
    (rows, terms), (columns, _) = ([int(n) for n in t.get_size()] for t in given[:2])
    multiprocessors, _ = facts(listed.arch_of(x.get_device()))
    return node(
        template("ipex_persistent", persistent.SOURCE, in_turns),
        given,
        ir.FixedLayout(x.get_device(), torch.float32, [rows, columns]),
        chosen.num_warps,
        chosen.num_stages,
        ALLOW_TF32=False,
        **persistent.constants(rows, columns, terms, bias is not None, chosen, multiprocessors),
    )


def _linear(
    tile: Tile,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    other: Tensor | None,
    binary: str,
    unary: str,
    scalars: list[float],
    packed: bool,
) -> Tensor:
    """The epilogue is of unrounded sums, and the result is rounded once."""
    sums = torch.ops.ipex.persistent(x.reshape(-1, x.shape[-1]), weight, bias, [*astuple(tile)])
    return behind_rows(sums, x, other, binary, unary, scalars)


def _why_not(tile: Tile, problem: Problem) -> str | None:
    reason = why_not(problem)
    if reason is not None:
        return reason
    operands = named(problem)
    x, weight = operands["x"], operands["weight"]
    if not problem.arch.startswith("sm_90"):
        return "it is for Hopper's copy engine"
    if x.dtype == "float32":
        return NO_TF32
    if "other" in operands:
        return "there are no registers left for what is added"
    if not all(empty(each, torch.device("meta")).is_contiguous() for each in (x, weight)):
        return "its factors are not contiguous"
    rows, (columns, terms) = math.prod(ints(x.shape[:-1])), ints(weight.shape)
    sizes = {"rows": rows, "columns": columns, "terms": terms}
    few = [name for name, least in persistent.FEWEST.items() if sizes[name] < least]
    if few:
        return f"it has too few {' and '.join(few)}"
    if terms * getattr(torch, x.dtype).itemsize % persistent.VECTOR:
        return "its rows do not begin where the copy engine does"
    return None


CALLS = calls(persistent.NAME, persistent.SOURCE, persistent.TILES, _linear, _why_not)


def register() -> None:
    """Add the lowering to Inductor's registry."""
    register_lowering(torch.ops.ipex.persistent.default, type_promotion_kind=None)(_lower)
