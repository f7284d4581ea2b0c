"""Lowering of `ipex::conv_preactivated` (BN+ReLU+conv1x1) to one kernel where that is faster.

Otherwise the results of norm and ReLU are concatenated in memory.
"""

import math
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor
from torch._inductor import ir
from torch._inductor.lowering import register_lowering

from ipex_inductor.autotune.record import Operand, Problem
from ipex_inductor.lowerings.common.calls import Call, is_channels_last
from ipex_inductor.lowerings.common.conv_templates import ints, why_not_multiplied, with_epilogue
from ipex_inductor.lowerings.common.templated import (
    calls,
    dense,
    facts,
    in_turns,
    node,
    template,
)
from ipex_inductor.lowerings.conv.fused import FusedConv, as_conv_problem
from ipex_inductor.lowerings.problem.workload import operands_by_name
from ipex_inductor.ops.conv import batch_norm_relu as op
from ipex_inductor.templates.triton import batch_norm_relu
from ipex_inductor.templates.triton.batch_norm_relu import Tile

NAMES = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
VECTOR = 8  # 16-bit elements that are loaded at once


def extract_convolution(problem: Problem) -> Problem:
    """Return the problem of the convolution that reads the result of norm and ReLU."""
    by_name = operands_by_name(problem)
    x, weight = by_name["x"], by_name["weight"]
    batch, _, height, width = ints(x.shape)
    channels = int(weight.shape[1])
    strides = height * width * channels, 1, width * channels, channels
    activation = Operand((batch, channels, height, width), strides, x.dtype)
    biases = (by_name["bias"],) if "bias" in by_name else ()
    constants: dict[str, Any] = {n: problem.constants[n] for n in ("unary", "scalars")}
    constants |= {} if biases else {"bias": None}
    constants |= dict(zip(NAMES, op.WINDOW, strict=True))
    constants |= {"other": None, "binary": "none", "packed": ""}
    return as_conv_problem(problem, (activation, weight, *biases), constants)


def _why_odd(problem: Problem) -> str | None:
    """Return why neither the fused kernel nor separate ops can be measured, or None."""
    if problem.symbols:
        return "its sizes vary"
    x = operands_by_name(problem)["x"]
    return None if len(x.shape) == 4 else "it is not over a plane"


def _list_arguments(x: Tensor, weight: Tensor, bias: Any, *rest: Any) -> tuple[Any, ...]:
    *norm, unary, scalars = rest
    image = op.activate(x, *norm)
    return image, weight, bias, None, *op.WINDOW, "none", unary, scalars, ""


FUSED = FusedConv(extract_convolution, _list_arguments, why_odd=_why_odd)


def _is_offered(call: Call) -> bool:
    """Return whether a call is the library's.

    Our templates are left out: their gain is less than the time of one pass over the activation.
    """
    return call.arrange is None and not call.parameters


def _why_not(tile: Tile, problem: Problem) -> str | None:
    if reason := _why_odd(problem) or why_not_multiplied(extract_convolution(problem)):
        return reason
    if not problem.arch.startswith("sm_"):
        return f"the template is not for {problem.arch}"
    operands = operands_by_name(problem)
    first, *more_parts = _parts(operands)
    if not all(map(is_channels_last, (first, *more_parts))):
        return "a part is not channels-last"
    if len({first.dtype, *(o.dtype for o in more_parts)}) > 1:
        return "its parts are of several dtypes"
    if len({o.shape for o in more_parts}) > 1:
        return "its parts have different channel counts"
    widths = [int(o.shape[1]) for o in (first, *more_parts)]
    if any(width % VECTOR for width in widths):
        return "its pixels are not aligned to vectors"
    if more_parts and batch_norm_relu.lane(widths[1]) > tile.BLOCK_K:
        return "a part has more channels than a K step"
    batch, _, *image = ints(first.shape)
    multiprocessors, shared_memory = facts(problem.arch)
    columns = int(operands["weight"].shape[0])
    if not batch_norm_relu.fits(tile, batch * math.prod(image), columns, multiprocessors):
        return "the tile does not fit"
    itemsize = getattr(torch, first.dtype).itemsize
    return None if tile.shared(itemsize) <= shared_memory else "its stages exceed the shared memory"


def _parts(operands: dict[str, Operand]) -> list[Operand]:
    return [o for name, o in operands.items() if name == "x" or name.startswith("more")]


def _fold_norm(tile: Tile, x: Tensor, weight: Tensor, bias: Any, *rest: Any) -> Tensor:
    gamma, beta, mean, variance, epsilon, *_ = rest
    return op.affine(gamma, beta, mean, variance, epsilon)


def _run_fused(
    tile: Tile, affine: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any
) -> Tensor:
    """Run the fused template; its epilogue uses unrounded sums, and the result is rounded once.

    Args:
        tile: tile of the template.
        affine: scale and shift of the norm, [2, C].
        x: first part of the input, channels-last.
        weight: weight [N, C, 1, 1].
        bias: bias [N], or None.
        rest: remaining arguments of the op; the last three are the other parts of the input, the
            unary op and its scalars.
    """
    *_, more, unary, scalars = rest
    operands = x, affine, weight.flatten(1), bias, more
    rows = torch.ops.ipex.preactivated_rows(*operands, [*astuple(tile)])
    return with_epilogue(rows, x, x.shape[2:], None, None, ("none", unary, scalars))


def _lower(
    x: Any, affine: Any, weight: Any, bias: Any, more: Sequence[Any], tile: list[int]
) -> Any:
    chosen = Tile(*tile)
    x, *more = (dense(part, last=True) for part in (x, *more))
    factors = [dense(t) for t in (affine, weight, bias) if t is not None]
    batch, first, *image = ints(x.get_size())
    part_channels = ints(more[0].get_size())[1] if more else 0
    rows, columns = batch * math.prod(image), ints(weight.get_size())[0]
    sizes = rows, columns, first, part_channels, len(more), bias is not None, chosen
    return node(
        template("ipex_preactivated", batch_norm_relu.SOURCE, in_turns),
        (x, *factors, *more),
        ir.FixedLayout(x.get_device(), torch.float32, [rows, columns]),
        chosen.num_warps,
        chosen.num_stages,
        ALLOW_TF32=False,
        **batch_norm_relu.constants(*sizes),
    )


CALLS = (
    *FUSED.separate_calls(_is_offered),
    *calls(
        batch_norm_relu.NAME,
        batch_norm_relu.SOURCE,
        batch_norm_relu.TILES,
        _run_fused,
        _why_not,
        _fold_norm,
    ),
)


def register() -> None:
    """Add the lowering to Inductor's registry."""
    register_lowering(torch.ops.ipex.preactivated_rows.default, type_promotion_kind=None)(_lower)
