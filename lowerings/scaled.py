"""`ipex::conv_scaled`: channels scaled in the kernel that multiplies them, where that is faster.

Apart means that the graph stays as it is: the scaled image is written, and what its convolution
gets is chosen as of any other.
"""

import math
from dataclasses import astuple
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor
from torch._inductor import ir
from torch._inductor.lowering import register_lowering

from ipex_inductor.autotune.record import Problem
from ipex_inductor.lowerings import conv
from ipex_inductor.lowerings.calls import Call
from ipex_inductor.lowerings.conv_templates import ints, why_not_multiplied, with_epilogue
from ipex_inductor.lowerings.templated import (
    calls,
    dense,
    facts,
    in_turns,
    is_xe,
    node,
    template,
)
from ipex_inductor.lowerings.workload import named
from ipex_inductor.ops.scaled import WINDOW
from ipex_inductor.templates import scaled
from ipex_inductor.templates.scaled import Tile

NAMES = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")


def apart(problem: Problem) -> Problem:
    """The convolution of what was scaled."""
    x, _, *others = problem.operands
    window = ((tuple(v) if isinstance(v, list) else v) for v in WINDOW)
    constants = {**problem.constants, **dict(zip(NAMES, window, strict=True)), "packed": ""}
    op = str(torch.ops.ipex.conv.default)
    return replace(problem, op=op, operands=(x, *others), constants=constants, epilogue="")


def _apart(
    call: Call, x: Tensor, scale: Tensor, weight: Tensor, bias: Any, other: Any, *words: Any
) -> Tensor:
    return call.body(x * scale, weight, bias, other, *WINDOW, *words, "")


def _why_not(tile: Tile, problem: Problem) -> str | None:
    if problem.symbols:
        return "its sizes vary"
    if reason := why_not_multiplied(apart(problem)):
        return reason
    if is_xe(problem.arch):
        return "no template has it on Intel's GPUs"
    operands = named(problem)
    if 0 in operands["scale"].shape or operands["scale"].dtype != operands["x"].dtype:
        return "it is scaled by what is empty, or in another dtype"
    if not scaled.fits(tile, int(operands["weight"].shape[0])):
        return "the tile does not fit"
    _, room = facts(problem.arch)
    itemsize = getattr(torch, operands["x"].dtype).itemsize
    needed = tile.shared(math.prod(ints(operands["x"].shape[2:])), itemsize)
    return None if needed <= room else "there is no shared memory for its stages"


def _scaled(tile: Tile, x: Tensor, scale: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    """By the template. The epilogue is of unrounded sums; the result is rounded once."""
    bias, other, *words = rest
    matrices = scale.flatten(1), weight.flatten(1)
    rows = torch.ops.ipex.scaled_rows(x, *matrices, bias, [*astuple(tile)])
    return with_epilogue(rows, x, x.shape[2:], None, other, *words, "")


def _lower(x: Any, scale: Any, weight: Any, bias: Any, tile: list[int]) -> Any:
    chosen = Tile(*tile)
    images, terms, *sides = ints(x.get_size())
    columns = ints(weight.get_size())[0]
    tensors = dense(x, last=True), *(dense(t) for t in (scale, weight, bias) if t is not None)
    return node(
        template("ipex_scaled", scaled.SOURCE, in_turns),
        tensors,
        ir.FixedLayout(x.get_device(), torch.float32, [images * math.prod(sides), columns]),
        chosen.num_warps,
        chosen.num_stages,
        ALLOW_TF32=False,
        **scaled.constants(images, math.prod(sides), columns, terms, bias is not None, chosen),
    )


CALLS = (
    *conv.calls_apart(apart, _apart),
    *calls(scaled.NAME, scaled.SOURCE, scaled.TILES, _scaled, _why_not),
)


def register() -> None:
    """Add the lowering to Inductor's registry."""
    register_lowering(torch.ops.ipex.scaled_rows.default, type_promotion_kind=None)(_lower)
