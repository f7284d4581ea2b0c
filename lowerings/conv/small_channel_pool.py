"""Lowering of `ipex::conv_pool`, a small-channel convolution and its max pool, to one kernel."""

import math
from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor
from torch._inductor import ir

from ipex_inductor.autotune.record import Problem
from ipex_inductor.lowerings.common.calls import Call, is_channels_last
from ipex_inductor.lowerings.common.conv_templates import (
    FEW_CHANNELS,
    counted_grid,
    expand_padding,
    ints,
    is_last,
    stem_matrix,
    why_not_ours,
)
from ipex_inductor.lowerings.common.registering import register_by_name
from ipex_inductor.lowerings.common.templated import calls, dense, node, template
from ipex_inductor.lowerings.conv.fused import FusedConv, as_conv_problem
from ipex_inductor.lowerings.problem.workload import empty, operands_by_name
from ipex_inductor.ops.common.defining import Arguments
from ipex_inductor.ops.conv.geometry import image_of, sides
from ipex_inductor.ops.conv.small_channel import runs
from ipex_inductor.ops.conv.small_channel_pool import AROUND, STEP, WINDOW
from ipex_inductor.templates.triton import conv_small_channel_pool
from ipex_inductor.templates.triton.conv_small_channel_pool import Tile

NAME = "ipex.triton.stem_pool"
STAGES = 2  # The kernel's loop is not pipelined.
MOST = 2**31 - 1  # elements of an activation of one sample
HALVES = ("bfloat16", "float16")  # dtypes of which a register holds two elements
# Arguments of `ipex::conv` after its stride and padding.
REST: dict[str, Any] = {"dilation": [1, 1], "transposed": False, "output_padding": [0, 0]}
REST |= {"groups": 1, "binary": "none", "unary": "relu", "scalars": [], "packed": ""}


def extract_convolution(problem: Problem) -> Problem:
    """Return the problem of the convolution with its ReLU."""
    constants = {**problem.constants, "other": None, **REST}
    return as_conv_problem(problem, (*operands_by_name(problem).values(),), constants)


def _list_arguments(
    x: Tensor, weight: Tensor, bias: Tensor | None, *geometry: list[int]
) -> tuple[Any, ...]:
    return x, weight, bias, None, *geometry, *REST.values()


def _pool(activation: Tensor) -> Tensor:
    return torch.max_pool2d(activation, WINDOW, STEP, AROUND)


FUSED = FusedConv(extract_convolution, _list_arguments, _pool)


def _is_offered(call: Call) -> bool:
    is_clamping = call.epilogues is None or ("none", "relu") in call.epilogues
    return is_clamping and not call.name.startswith("ipex.sycl")


def _why_not(tile: Tile, problem: Problem) -> str | None:
    operands, constants = operands_by_name(problem), problem.constants
    x, weight = operands["x"], operands["weight"]
    if len(x.shape) == 4 and int(weight.shape[1]) > FEW_CHANNELS:
        return "it has too many channels for the small-channel template"
    if reason := why_not_ours(extract_convolution(problem)):
        return reason
    if x.dtype not in HALVES:
        return f"two of {x.dtype} do not fill a register"
    if not problem.arch.startswith("sm_"):
        return f"the template is not for {problem.arch}"
    last = is_channels_last(x)
    if not last and not empty(x, torch.device("meta")).is_contiguous():
        return "its input is neither channels-last nor contiguous"
    image, window = ints(x.shape[1:]), ints(weight.shape[2:])
    if math.prod(image) > MOST:
        return "its activation has too many elements for 32-bit indices"
    stride, padding = ints(constants["stride"]), expand_padding(ints(constants["padding"]))
    patch_runs = runs(image, window, stride, padding, last)
    fits = conv_small_channel_pool.fits(tile, int(weight.shape[0]), patch_runs.terms)
    return None if fits else "the tile does not fit"


def _matrix(tile: Tile, x: Tensor, weight: Tensor, bias: Any, *geometry: list[int]) -> Tensor:
    return stem_matrix(tile, x, weight, bias, None, *geometry)


def _run_fused(
    tile: Tile,
    matrix: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
) -> Tensor:
    geometry = [*weight.shape[2:]], stride, expand_padding(padding)
    rows = torch.ops.ipex.stem_pool_rows(x, matrix, bias, *geometry, is_last(x), [*astuple(tile)])
    size = conv_small_channel_pool.pooled_size(sides(x.shape[2:], *geometry))
    return image_of(rows, len(x), *size)


def _lower(call: Arguments) -> Any:
    x, matrix = dense(call.x, call.last), dense(call.matrix)
    biases = () if call.bias is None else (dense(call.bias),)
    chosen = Tile(*call.tile)
    batch, *image = ints(x.get_size())
    columns = ints(matrix.get_size())[1]
    geometry = call.window, call.stride, call.padding, call.last, chosen
    constants = conv_small_channel_pool.constants(
        batch, image, columns, *geometry, bool(biases), ptx=True
    )
    rows = batch * constants["POOL_H"] * constants["POOL_W"]
    return node(
        template("ipex_stem_pool", conv_small_channel_pool.SOURCE, counted_grid),
        (x, matrix, *biases),
        ir.FixedLayout(x.get_device(), x.get_dtype(), [rows, columns]),
        chosen.num_warps,
        STAGES,
        ALLOW_TF32=False,
        **constants,
    )


CALLS = (
    *FUSED.separate_calls(_is_offered),
    *calls(
        NAME,
        conv_small_channel_pool.SOURCE,
        conv_small_channel_pool.TILES,
        _run_fused,
        _why_not,
        _matrix,
    ),
)


def register() -> None:
    """Add the lowering to Inductor's registry."""
    register_by_name(torch.ops.ipex.stem_pool_rows.default, _lower)
