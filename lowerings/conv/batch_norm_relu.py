"""`ipex::conv_preactivated`: norm and relu in the kernel that multiplies, where that is faster.

Apart means that the graph stays as it is: what they make is written, side by side, and what its
convolution gets is chosen as of any other.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

import torch
from msgspec.structs import replace
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
from ipex_inductor.lowerings.conv import conv
from ipex_inductor.lowerings.problem.workload import named
from ipex_inductor.ops import preactivated as op
from ipex_inductor.templates.triton import batch_norm_relu
from ipex_inductor.templates.triton.batch_norm_relu import Tile

NAMES = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
VECTOR = 8  # numbers of 16 bits that are loaded at once


def apart(problem: Problem) -> Problem:
    """The convolution of what norm and relu make."""
    given = named(problem)
    x, weight = given["x"], given["weight"]
    batch, _, height, width = ints(x.shape)
    channels = int(weight.shape[1])
    strides = height * width * channels, 1, width * channels, channels
    image = Operand((batch, channels, height, width), strides, x.dtype)
    operands = image, weight, *([given["bias"]] if "bias" in given else [])
    words = {name: problem.constants[name] for name in ("unary", "scalars")}
    words |= {} if "bias" in given else {"bias": None}
    window = ((tuple(v) if isinstance(v, list) else v) for v in op.WINDOW)
    words |= dict(zip(NAMES, window, strict=True))
    words |= {"other": None, "binary": "none", "packed": ""}
    name = str(torch.ops.ipex.conv.default)
    return replace(problem, op=name, operands=operands, constants=words, epilogue="")


def _why_odd(problem: Problem) -> str | None:
    """Why neither together nor apart is measured."""
    if problem.symbols:
        return "its sizes vary"
    x = named(problem)["x"]
    return None if len(x.shape) == 4 else "it is not over a plane"


def _why_not_apart(call: Call, problem: Problem) -> str | None:
    if reason := _why_odd(problem):
        return reason
    alone = apart(problem)
    return call.why_not(alone) if call.has_epilogue(alone) else "it has another epilogue"


def _apart(call: Call, x: Tensor, weight: Tensor, bias: Any, *rest: Any) -> Tensor:
    *norm, unary, scalars = rest
    image = op.activated(x, *norm)
    return call.body(image, weight, bias, None, *op.WINDOW, "none", unary, scalars, "")


def _calls_apart() -> tuple[Call, ...]:
    """Those of the convolution that a library has; the first is Inductor's.

    What a template of ours would gain beside it is less than a pass over the image takes.
    """
    return tuple(
        Call(
            call.name,
            functools.partial(_apart, call),
            functools.partial(_why_not_apart, call),
            apart=True,
        )
        for call in conv.CALLS
        if call.arrange is None and not call.parameters
    )


def _why_not(tile: Tile, problem: Problem) -> str | None:
    if reason := _why_odd(problem) or why_not_multiplied(apart(problem)):
        return reason
    if not problem.arch.startswith("sm_"):
        return f"the template is not for {problem.arch}"
    operands = named(problem)
    first, *others = _parts(operands)
    if not all(map(is_channels_last, (first, *others))):
        return "a part is not channels-last"
    if len({first.dtype, *(o.dtype for o in others)}) > 1:
        return "its parts are of several dtypes"
    if len({o.shape for o in others}) > 1:
        return "its parts are of several widths"
    widths = [int(o.shape[1]) for o in (first, *others)]
    if any(width % VECTOR for width in widths):
        return "its pixels do not begin at whole vectors"
    if others and batch_norm_relu.lane(widths[1]) > tile.BLOCK_K:
        return "a part is wider than a step"
    batch, _, *image = ints(first.shape)
    multiprocessors, room = facts(problem.arch)
    columns = int(operands["weight"].shape[0])
    if not batch_norm_relu.fits(tile, batch * math.prod(image), columns, multiprocessors):
        return "the tile does not fit"
    itemsize = getattr(torch, first.dtype).itemsize
    return None if tile.shared(itemsize) <= room else "there is no shared memory for its stages"


def _parts(operands: dict[str, Operand]) -> list[Operand]:
    return [o for name, o in operands.items() if name == "x" or name.startswith("more")]


def _arranged(tile: Tile, x: Tensor, weight: Tensor, bias: Any, *rest: Any) -> Tensor:
    gamma, beta, mean, variance, epsilon, *_ = rest
    return op.affine(gamma, beta, mean, variance, epsilon)


def _together(
    tile: Tile, affine: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any
) -> Tensor:
    """By the template. The epilogue is of unrounded sums; the result is rounded once."""
    *_, more, unary, scalars = rest
    given = x, affine, weight.flatten(1), bias, more
    rows = torch.ops.ipex.preactivated_rows(*given, [*astuple(tile)])
    return with_epilogue(rows, x, x.shape[2:], None, None, "none", unary, scalars, "")


def _lower(
    x: Any, affine: Any, weight: Any, bias: Any, more: Sequence[Any], tile: list[int]
) -> Any:
    chosen = Tile(*tile)
    x, *more = (dense(part, last=True) for part in (x, *more))
    factors = [dense(t) for t in (affine, weight, bias) if t is not None]
    batch, first, *image = ints(x.get_size())
    each = ints(more[0].get_size())[1] if more else 0
    rows, columns = batch * math.prod(image), ints(weight.get_size())[0]
    known = rows, columns, first, each, len(more), bias is not None, chosen
    return node(
        template("ipex_preactivated", batch_norm_relu.SOURCE, in_turns),
        (x, *factors, *more),
        ir.FixedLayout(x.get_device(), torch.float32, [rows, columns]),
        chosen.num_warps,
        chosen.num_stages,
        ALLOW_TF32=False,
        **batch_norm_relu.constants(*known),
    )


CALLS = (
    *_calls_apart(),
    *calls(
        batch_norm_relu.NAME,
        batch_norm_relu.SOURCE,
        batch_norm_relu.TILES,
        _together,
        _why_not,
        _arranged,
    ),
)


def register() -> None:
    """Add the lowering to Inductor's registry."""
    register_lowering(torch.ops.ipex.preactivated_rows.default, type_promotion_kind=None)(_lower)
