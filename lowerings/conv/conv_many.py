"""Triton convolutions of many channels: implicit GEMMs that gather rows or load TMA tiles.

Like the templates of `conv_templates.py`, they are candidates beside a library's calls and are
lowered where chosen.
"""

import math
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor

from ipex_inductor.autotune.record import Operand, Problem
from ipex_inductor.lowerings.common.conv_templates import (
    expand_padding,
    finish_conv,
    geometry_of,
    in_a_row,
    ints,
    is_product,
    kernel,
    why_not_multiplied,
)
from ipex_inductor.lowerings.common.registering import register_by_name
from ipex_inductor.lowerings.common.templated import (
    align_to_vector,
    calls,
    dense,
    facts,
    in_turns,
    is_xe,
)
from ipex_inductor.lowerings.problem import selector_hook
from ipex_inductor.lowerings.problem.workload import operands_by_name
from ipex_inductor.ops.common.defining import Arguments
from ipex_inductor.ops.conv.conv import ConvArgs
from ipex_inductor.ops.conv.fprop import rows_of_weight
from ipex_inductor.ops.conv.geometry import sides
from ipex_inductor.templates.triton import conv_fprop, conv_tma, weight_stationary

Tile = conv_fprop.Tile | conv_tma.Tile
# Batch, activation [C, H, W], output channels; kernel, stride, padding, dilation.
Shape = tuple[int, list[int], int, list[int], list[int], list[int], list[int]]


def _why_not(problem: Problem) -> str | None:
    """Return why neither template can compute `problem`, or None."""
    operands, constants = operands_by_name(problem), problem.constants
    x = operands["x"]
    if constants["groups"] != 1 or int(x.shape[1]) < conv_fprop.FEWEST_CHANNELS:
        return "it is grouped or has too few channels"
    if reason := why_not_multiplied(problem):
        return reason
    short = int(x.shape[1]) <= weight_stationary.MOST_TERMS and not is_xe(problem.arch)
    return "the weight-stationary GEMM is faster" if short and is_product(problem) else None


def _why_not_fprop(tile: conv_fprop.Tile, problem: Problem) -> str | None:
    reason = _why_not(problem)
    if reason is not None:
        return reason
    out_channels, channels, *window = ints(operands_by_name(problem)["weight"].shape)
    if math.prod(window) > conv_fprop.MOST_PLACES:
        return "its kernel is too large"
    wide = tile.BLOCK_N > conv_fprop.NARROW and problem.arch.startswith("sm_")
    if wide and _intensity(problem) > conv_fprop.MOST_INTENSE:
        return "it is compute-bound, where cuDNN is faster"
    return None if conv_fprop.fits(tile, channels, out_channels) else "the tile does not fit"


def _why_not_boxes(tile: conv_tma.Tile, problem: Problem) -> str | None:
    reason = _why_not(problem)
    if reason is not None:
        return reason
    out_channels, channels, *window = ints(operands_by_name(problem)["weight"].shape)
    if math.prod(window) > conv_tma.MOST_PLACES:
        return "its kernel is too large"
    image, elements = operands_by_name(problem)["x"], _pixels(problem) * out_channels
    return why_not_in_boxes(tile, problem, image, [channels], out_channels, elements)


def why_not_in_boxes(
    tile: conv_tma.Tile,
    problem: Problem,
    image: Operand,
    terms: Sequence[int],
    out_channels: int,
    elements: int,
) -> str | None:
    """Return why the TMA template cannot compute a convolution; None if it can.

    Args:
        tile: tile of the template.
        problem: problem of the convolution.
        image: activation that is read in steps of the problem's stride.
        terms: channel counts that are summed up.
        out_channels: output channels, N.
        elements: elements of the result.
    """
    if not problem.arch.startswith("sm_90"):
        return "it is for Hopper's copy engine"
    if any(channels % conv_tma.FEWEST_TERMS for channels in terms):
        return "its channels are not a multiple of the K step"
    stride = ints(problem.constants["stride"])
    if any(size % step for size, step in zip(ints(image.shape[2:]), stride, strict=True)):
        return "its strides do not divide the activation"
    if not conv_tma.fits(tile, out_channels):
        return "the tile does not fit"
    multiprocessors, shared_memory = facts(problem.arch)
    if shared_by_boxes(tile, terms, getattr(torch, image.dtype)) > shared_memory:
        return "it exceeds the shared memory"
    blocks = elements / (tile.BLOCK_M * tile.BLOCK_N)
    return None if 2 * blocks >= multiprocessors else "it has too few blocks"


def shared_by_boxes(tile: conv_tma.Tile, terms: Sequence[int], dtype: torch.dtype) -> int:
    """Return a program's bytes of shared memory for the largest K step of `terms` channels."""
    return tile.shared(max(map(conv_tma.terms_of, terms)), dtype.itemsize)


def _pixels(problem: Problem) -> int:
    """Return the number of output pixels of the whole batch."""
    operands, constants = operands_by_name(problem), problem.constants
    batch, _, *size = ints(operands["x"].shape)
    stride, padding, dilation = (
        ints(constants[name]) for name in ("stride", "padding", "dilation")
    )
    kernel_size = ints(operands["weight"].shape[2:])
    return batch * math.prod(sides(size, kernel_size, stride, expand_padding(padding), dilation))


def _intensity(problem: Problem) -> float:
    """Return the operations per byte of activation, result and addend."""
    operands, pixels = operands_by_name(problem), _pixels(problem)
    x, weight = ints(operands["x"].shape), ints(operands["weight"].shape)
    written = pixels * weight[0] * (2 if "other" in operands else 1)
    size: int = getattr(torch, operands["x"].dtype).itemsize
    return 2 * pixels * math.prod(weight) / (size * (math.prod(x) + written))


def _weight_rows(tile: Any, x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    return rows_of_weight(weight)


def _conv(template: str) -> Any:
    def body(tile: Tile, rows: Tensor, *args: Any) -> Tensor:
        call = ConvArgs(*args)
        window = geometry_of(call)
        sums = torch.ops.ipex.conv_fprop(call.x, rows, *window, template, [*astuple(tile)])
        return finish_conv(sums, call, sides(call.x.shape[2:], *window))

    return body


def _lower(call: Arguments) -> Any:
    inputs = dense(call.x, last=True), dense(call.rows)
    batch, *image = ints(call.x.get_size())
    window = call.window, call.stride, call.padding, call.dilation
    shape = batch, image, ints(call.rows.get_size())[0], *window
    lower = {"fprop": _lower_fprop, "boxes": _lower_boxes}[call.template]
    return lower(inputs, shape, call.tile)


def _lower_fprop(inputs: tuple[Any, Any], shape: Shape, tile: list[int]) -> Any:
    chosen = conv_fprop.Tile(*tile)
    constants = conv_fprop.constants(*shape, chosen)
    source, warps, stages = conv_fprop.SOURCE, chosen.num_warps, chosen.num_stages
    return kernel("fprop", source, in_a_row, inputs, warps, constants, stages)


def _lower_boxes(inputs: tuple[Any, Any], shape: Shape, tile: list[int]) -> Any:
    chosen = conv_tma.Tile(*tile)
    x, rows = (align_to_vector(tensor, conv_tma.VECTOR) for tensor in inputs)
    multiprocessors, shared_memory = facts(selector_hook.arch_of(x.get_device()))
    shared = shared_by_boxes(chosen, shape[1][:1], x.get_dtype())
    programs = multiprocessors * max(1, shared_memory // shared)
    constants = conv_tma.constants(*shape, chosen, programs)
    source, warps, stages = conv_tma.SOURCE, chosen.num_warps, chosen.num_stages
    return kernel("boxes", source, in_turns, (x, rows), warps, constants, stages)


CALLS = (
    *calls(
        "ipex.triton.fprop",
        conv_fprop.SOURCE,
        conv_fprop.TILES,
        _conv("fprop"),
        _why_not_fprop,
        _weight_rows,
        conv_fprop.XE_TILES,
    ),
    *calls(
        "ipex.triton.boxes",
        conv_tma.SOURCE,
        conv_tma.TILES,
        _conv("boxes"),
        _why_not_boxes,
        _weight_rows,
    ),
)


def register() -> None:
    """Add the lowering to Inductor's registry."""
    register_by_name(torch.ops.ipex.conv_fprop.default, _lower)
