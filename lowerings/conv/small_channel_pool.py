"""`ipex::conv_pool`: a stem and its pool in one kernel of ours, where that is faster than apart.

Apart means that the graph stays as it is: the convolution gets what is chosen of it as of any
other, and the pool is Inductor's.
"""

import functools
import math
from dataclasses import astuple
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor
from torch._inductor import ir
from torch._inductor.lowering import register_lowering

from ipex_inductor.autotune.record import Problem
from ipex_inductor.lowerings.common.calls import Call, is_channels_last
from ipex_inductor.lowerings.common.conv_templates import (
    FEW_CHANNELS,
    both,
    counted,
    ints,
    is_last,
    stem_matrix,
    why_not_ours,
)
from ipex_inductor.lowerings.common.templated import calls, dense, node, template
from ipex_inductor.lowerings.conv import conv
from ipex_inductor.lowerings.problem.workload import empty, named
from ipex_inductor.ops.stem import image_of, runs, sides
from ipex_inductor.ops.stem_pool import AROUND, STEP, WINDOW
from ipex_inductor.templates.triton import conv_small_channel_pool
from ipex_inductor.templates.triton.conv_small_channel_pool import Tile

NAME = "ipex.triton.stem_pool"
STAGES = 2  # nothing of its loop is overlapped
MOST = 2**31 - 1  # elements of an image
HALVES = ("bfloat16", "float16")  # of which a register has two
# Of the convolution, as an op of ours, behind its stride and padding.
REST: dict[str, Any] = {"dilation": [1, 1], "transposed": False, "output_padding": [0, 0]}
REST |= {"groups": 1, "binary": "none", "unary": "relu", "scalars": [], "packed": ""}


def apart(problem: Problem) -> Problem:
    """The convolution with its relu."""
    rest = {k: tuple(v) if isinstance(v, list) else v for k, v in REST.items()}
    given = {**problem.constants, "other": None, **rest}
    operands = (*named(problem).values(),)
    op = str(torch.ops.ipex.conv.default)
    return replace(problem, op=op, operands=operands, constants=given, epilogue="")


def _as_conv(x: Tensor, weight: Tensor, bias: Tensor | None, *around: list[int]) -> tuple[Any, ...]:
    return x, weight, bias, None, *around, *REST.values()


def _calls_apart() -> tuple[Call, ...]:
    """Those of the convolution, with torch's pool behind them. The first is Inductor's."""

    def body(call: Call, *args: Any) -> Tensor:
        own = (args[0],) if call.arrange else ()
        made = call.body(*own, *_as_conv(*args[len(own) :]))
        return torch.max_pool2d(made, WINDOW, STEP, AROUND)

    def arrange(call: Call, *args: Any) -> Tensor:
        assert call.arrange is not None
        return call.arrange(*_as_conv(*args))

    return tuple(
        Call(
            call.name,
            functools.partial(body, call),
            functools.partial(lambda call, problem: call.why_not(apart(problem)), call),
            parameters=call.parameters,
            version=call.version,
            arrange=call.arrange and functools.partial(arrange, call),
            apart=True,
        )
        for call in conv.CALLS
        if not call.name.startswith("ipex.sycl")
        and (call.epilogues is None or ("none", "relu") in call.epilogues)
    )


def _why_not(tile: Tile, problem: Problem) -> str | None:
    operands, given = named(problem), problem.constants
    x, weight = operands["x"], operands["weight"]
    if len(x.shape) == 4 and int(weight.shape[1]) > FEW_CHANNELS:
        return "it has more than a few channels"
    if reason := why_not_ours(apart(problem)):
        return reason
    if x.dtype not in HALVES:
        return f"two of {x.dtype} are no register"
    if not problem.arch.startswith("sm_"):
        return f"the template is not for {problem.arch}"
    last = is_channels_last(x)
    if not last and not empty(x, torch.device("meta")).is_contiguous():
        return "its input is neither channels-last nor contiguous"
    image, window = ints(x.shape[1:]), ints(weight.shape[2:])
    if math.prod(image) > MOST:
        return "the places within an image are no numbers of 32 bits"
    stride, padding = ints(given["stride"]), both(ints(given["padding"]))
    found = runs(image, window, stride, padding, last)
    fits = conv_small_channel_pool.fits(tile, int(weight.shape[0]), found.terms)
    return None if fits else "the tile does not fit"


def _matrix(tile: Tile, x: Tensor, weight: Tensor, bias: Any, *around: list[int]) -> Tensor:
    return stem_matrix(tile, x, weight, bias, None, *around)


def _pooled(
    tile: Tile,
    matrix: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
) -> Tensor:
    around = [*weight.shape[2:]], stride, both(padding)
    rows = torch.ops.ipex.stem_pool_rows(x, matrix, bias, *around, is_last(x), [*astuple(tile)])
    size = conv_small_channel_pool.pooled(sides(x.shape[2:], *around))
    return image_of(rows, len(x), *size)


def _lower(
    x: Any,
    matrix: Any,
    bias: Any,
    window: list[int],
    stride: list[int],
    padding: list[int],
    last: bool,
    tile: list[int],
) -> Any:
    x, matrix = dense(x, last), dense(matrix)
    inputs = (x, matrix) if bias is None else (x, matrix, dense(bias))
    chosen = Tile(*tile)
    batch, *image = ints(x.get_size())
    columns = ints(matrix.get_size())[1]
    around = window, stride, padding, last, chosen
    known = conv_small_channel_pool.constants(
        batch, image, columns, *around, bias is not None, ptx=True
    )
    rows = batch * known["POOL_H"] * known["POOL_W"]
    return node(
        template("ipex_stem_pool", conv_small_channel_pool.SOURCE, counted),
        inputs,
        ir.FixedLayout(x.get_device(), x.get_dtype(), [rows, columns]),
        chosen.num_warps,
        STAGES,
        ALLOW_TF32=False,
        **known,
    )


CALLS = (
    *_calls_apart(),
    *calls(
        NAME,
        conv_small_channel_pool.SOURCE,
        conv_small_channel_pool.TILES,
        _pooled,
        _why_not,
        _matrix,
    ),
)


def register() -> None:
    """Add the lowering to Inductor's registry."""
    register_lowering(torch.ops.ipex.stem_pool_rows.default, type_promotion_kind=None)(_lower)
