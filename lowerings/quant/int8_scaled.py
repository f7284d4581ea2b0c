"""Lowering of products of 8-bit integers on a GPU to Triton templates, and their candidates."""

from collections.abc import Callable
from dataclasses import astuple
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._inductor import ir

from ipex_inductor.autotune.record import Problem
from ipex_inductor.lowerings.common.calls import Call, always, is_channels_last
from ipex_inductor.lowerings.common.conv_templates import in_a_row, ints
from ipex_inductor.lowerings.common.registering import register_by_name
from ipex_inductor.lowerings.common.templated import (
    align_to_vector,
    calls,
    dense,
    facts,
    in_turns,
    node,
    template,
)
from ipex_inductor.lowerings.gemm.rows import rows_of_image, rows_of_layer
from ipex_inductor.lowerings.problem import selector_hook
from ipex_inductor.lowerings.problem.spaces import DEFAULT_INT8
from ipex_inductor.lowerings.problem.workload import operands_by_name
from ipex_inductor.ops.common.defining import Arguments
from ipex_inductor.ops.conv.geometry import sides
from ipex_inductor.ops.quant import int8_scaled
from ipex_inductor.ops.quant.int8_operands import padded_channels
from ipex_inductor.templates.triton import (
    conv_fprop,
    conv_tma,
    int8_boxes,
    int8_conv,
    int8_gemm,
    int8_streamed,
    persistent,
    weight_stationary,
)

ipex = torch.ops.ipex
# Returns why a tile may not compute a problem of M rows and K terms, or None.
WhyNoRows = Callable[[Any, Problem, int, int], str | None]
HOPPER = "sm_90"
OPERANDS = 3  # activation, weight and factors; an addend and its scale may follow
BYTES = 1  # of an operand's element
# Without a record: the tile of a GEMM by its columns, and the fewest rows that it is for.
WIDE, FEWEST_ROWS = 128, 1024


def _lower_gemm(call: Arguments) -> Any:
    rows, terms = ints(call.x.get_size())
    columns = ints(call.factors.get_size())[1]
    arch = selector_hook.arch_of(call.x.get_device())
    tile = _gemm_tile(call, arch, rows, columns, terms)
    if isinstance(tile, weight_stationary.Tile):
        multiprocessors, shared_memory = facts(arch)
        fitting = tile.fitting(shared_memory, terms, BYTES, True)
        constants = int8_streamed.constants(
            rows, columns, terms, tile, multiprocessors * max(1, fitting)
        )
        kernel = template("ipex_int8_streamed", int8_streamed.SOURCE, in_turns)
        return _result(kernel, _operands(call, dense(call.x)), rows, columns, tile, constants)
    if tile is None:
        # A GEMM is a convolution of single pixels.
        ones, nothing = [1, 1], [0, 0]
        return _gather((rows, [terms, 1, 1]), call, ones, ones, nothing, ones, call.tile)
    multiprocessors, shared_memory = facts(arch)
    programs = multiprocessors * max(1, shared_memory // tile.shared(BYTES))
    constants = int8_gemm.constants(rows, columns, terms, tile, programs)
    operands = _operands(call, dense(call.x))
    kernel = template("ipex_int8_gemm", int8_gemm.SOURCE, in_turns)
    return _result(kernel, operands, rows, columns, tile, constants)


def _gemm_tile(
    call: Arguments, arch: str, rows: int, columns: int, terms: int
) -> persistent.Tile | weight_stationary.Tile | None:
    """Return the tile of a template of GEMMs, or None if the template of convolutions is used.

    Args:
        call: arguments of the op.
        arch: architecture of the device.
        rows: M.
        columns: N.
        terms: K.
    """
    if call.template == "streamed":
        return weight_stationary.Tile(*call.tile)
    if call.template:
        return persistent.Tile(*call.tile) if call.template == "gemm" else None
    if rows >= weight_stationary.FEWEST_ROWS and terms <= weight_stationary.MOST_TERMS:
        return (
            int8_streamed.TILES[2]
            if columns > weight_stationary.NARROWEST
            else int8_streamed.TILES[3]
        )
    if not arch.startswith(HOPPER) or terms % int8_gemm.VECTOR or rows < FEWEST_ROWS:
        return None
    return int8_gemm.TILES[2] if columns >= WIDE else int8_gemm.TILES[5]


def _lower_conv(call: Arguments) -> Any:
    batch, *image = ints(call.x.get_size())
    geometry = call.window, call.stride, call.padding, call.dilation
    arch = selector_hook.arch_of(call.x.get_device())
    columns = ints(call.factors.get_size())[1]
    is_boxed = call.template == "boxes"
    if not call.template and _why_not_boxed(arch, image, *geometry) is None:
        is_boxed = True
    if not is_boxed:
        return _gather((batch, image), call, *geometry, call.tile)
    tile = conv_tma.Tile(*call.tile) if call.tile else _boxes_tile(columns)
    multiprocessors, shared_memory = facts(arch)
    shared = tile.shared(int8_boxes.terms_of(image[0]), BYTES)
    programs = multiprocessors * max(1, shared_memory // shared)
    constants = int8_boxes.constants(batch, image, columns, *geometry, tile, programs)
    kernel = template("ipex_int8_boxes", int8_boxes.SOURCE, in_turns)
    rows = batch * constants["OUT_H"] * constants["OUT_W"]
    return _result(
        kernel, _operands(call, dense(call.x, last=True)), rows, columns, tile, constants
    )


def _boxes_tile(columns: int) -> conv_tma.Tile:
    return int8_boxes.TILES[2] if columns >= WIDE else int8_boxes.TILES[3]


def _gather(
    sizes: tuple[int, list[int]],
    call: Arguments,
    window: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    given: list[int],
) -> Any:
    """Lower to the template that gathers rows.

    Args:
        sizes: the batch, and [C, H, W] of an image.
        call: arguments of the op.
        window: size of the kernel.
        stride: of each dimension.
        padding: of each dimension.
        dilation: of each dimension.
        given: fields of a tile, or an empty list.
    """
    batch, image = sizes
    columns = ints(call.factors.get_size())[1]
    height, width = sides(image[1:], window, stride, padding, dilation)
    rows = batch * height * width
    multiprocessors, _ = facts(selector_hook.arch_of(call.x.get_device()))
    step = image[0], window, dilation
    depth, lines = int8_conv.depth_of(*step), int8_conv.has_lines(*step)
    chosen = int8_conv.choose_tile(rows, columns, depth, lines, multiprocessors)
    tile = conv_fprop.Tile(*given) if given else chosen
    geometry = window, stride, padding, dilation
    constants = int8_conv.constants(batch, image, columns, *geometry, tile)
    x = dense(call.x, last=len(call.x.get_size()) == 4)
    kernel = template("ipex_int8_conv", int8_conv.SOURCE, in_a_row)
    return _result(kernel, _operands(call, x), rows, columns, tile, constants)


def _operands(call: Arguments, x: Any) -> tuple[Any, ...]:
    tensors = [x, dense(call.rows), dense(call.factors)]
    tensors += [] if call.other is None else [dense(call.other), dense(call.scale)]
    return tuple(align_to_vector(tensor, int8_gemm.VECTOR) for tensor in tensors)


def _result(
    kernel: Any, operands: tuple[Any, ...], rows: int, columns: int, tile: Any, constants: Any
) -> Any:
    layout = ir.FixedLayout(operands[0].get_device(), torch.float32, [rows, columns])
    given = {**constants, "ADDED": len(operands) > OPERANDS}
    return node(kernel, operands, layout, tile.num_warps, tile.num_stages, **given)


def _why_not_boxed(
    arch: str,
    image: list[int],
    window: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
) -> str | None:
    """Return why TMA tiles cannot serve a convolution, or None.

    Args:
        arch: architecture of the device.
        image: [C, H, W] of the activation.
        window: size of the kernel.
        stride: of each dimension.
        padding: of each dimension.
        dilation: of each dimension.
    """
    if not arch.startswith(HOPPER):
        return "it is for Hopper's copy engine"
    if image[0] % int8_boxes.FEWEST_TERMS:
        return "its channels are not a multiple of the K step"
    if any(size % step for size, step in zip(image[1:], stride, strict=True)):
        return "its strides do not divide the activation"
    return None


def _geometry(problem: Problem) -> tuple[list[int], ...]:
    names = "window", "stride", "padding", "dilation"
    window, stride, padding, dilation = (ints(problem.constants[name]) for name in names)
    return window, stride, padding[:2], dilation


def _columns(problem: Problem) -> int:
    return int(operands_by_name(problem)["factors"].shape[1])


def _why_not_gemm(tile: Any, problem: Problem, rows: int, terms: int) -> str | None:
    if not problem.arch.startswith(HOPPER):
        return "it is for Hopper's copy engine"
    if terms % int8_gemm.VECTOR:
        return "its rows are not aligned for TMA"
    if rows < int8_gemm.FEWEST_ROWS:
        return "it has too few rows"
    _, shared_memory = facts(problem.arch)
    if tile.shared(BYTES) > shared_memory:
        return "it exceeds the shared memory"
    wide = max(64, 1 << (_columns(problem) - 1).bit_length())
    deep = max(64, 1 << (terms - 1).bit_length())
    return None if wide >= tile.BLOCK_N and deep >= tile.BLOCK_K else "the tile does not fit"


def _why_not_gathered_rows(tile: Any, problem: Problem, rows: int, terms: int) -> str | None:
    sizes = rows, _columns(problem), terms, False
    return None if int8_conv.fits(tile, *sizes) else "the tile does not fit"


def _why_not_streamed(tile: Any, problem: Problem, rows: int, terms: int) -> str | None:
    if rows < weight_stationary.FEWEST_ROWS:
        return "M is too small for the weight-stationary template"
    if terms > int8_streamed.MOST_TERMS:
        return "K is too large to keep a block of the weight"
    _, shared_memory = facts(problem.arch)
    if not tile.fitting(shared_memory, terms, BYTES, "other" in operands_by_name(problem)):
        return "it exceeds the shared memory"
    fits = weight_stationary.fits(tile, _columns(problem))
    return None if fits else "the tile does not fit"


def _why_not_gathered(tile: Any, problem: Problem) -> str | None:
    batch, channels, *image = ints(operands_by_name(problem)["x"].shape)
    window, stride, padding, dilation = _geometry(problem)
    height, width = sides(image, window, stride, padding, dilation)
    step = padded_channels(channels), window, dilation
    if int8_scaled.may_fold_stride(channels, window, stride, dilation):
        joined = step[0] * int8_scaled.STRIDE**2
        step = joined, int8_scaled.folded_window(window, padding), dilation
    depth, lines = int8_conv.depth_of(*step), int8_conv.has_lines(*step)
    sizes = batch * height * width, _columns(problem), depth, lines
    return None if int8_conv.fits(tile, *sizes) else "the tile does not fit"


def _why_not_boxes(tile: conv_tma.Tile, problem: Problem) -> str | None:
    if int8_scaled.is_product(Arguments(**problem.constants)):
        return "it is a GEMM"
    _, *image = ints(operands_by_name(problem)["x"].shape)
    if reason := _why_not_boxed(problem.arch, image, *_geometry(problem)):
        return reason
    _, shared_memory = facts(problem.arch)
    if tile.shared(int8_boxes.terms_of(image[0]), BYTES) > shared_memory:
        return "it exceeds the shared memory"
    wide = max(64, 1 << (_columns(problem) - 1).bit_length())
    return None if wide >= tile.BLOCK_N else "the tile does not fit"


def _of_layer(why_not: WhyNoRows, tile: Any, problem: Problem) -> str | None:
    """Return why a tile may not compute a linear layer, by its rows and K, or None."""
    if reason := _why_empty(problem):
        return reason
    terms = int(operands_by_name(problem)["x"].shape[-1])
    return why_not(tile, problem, rows_of_layer(problem), terms)


def _of_image(
    why_not: Callable[[Any, Problem], str | None], tile: Any, problem: Problem
) -> str | None:
    """Return why a tile may not compute a convolution, or None."""
    if reason := _why_empty(problem):
        return reason
    if not is_channels_last(operands_by_name(problem)["x"]):
        return "its input is not channels-last"
    return why_not(tile, problem)


def _of_pixels(why_not: WhyNoRows, tile: Any, problem: Problem) -> str | None:
    """Return why a tile may not compute a convolution as a GEMM, by its rows and K, or None."""
    if not int8_scaled.is_product(Arguments(**problem.constants)):
        return "it is no 1x1 convolution with stride 1 and without padding"
    terms = int(operands_by_name(problem)["x"].shape[1])
    return why_not(tile, problem, rows_of_image(problem), terms)


def _why_empty(problem: Problem) -> str | None:
    sizes = (size for operand in problem.operands for size in operand.shape)
    return "a size is zero" if 0 in sizes else None


def _linear(name: str, tile: Any, *args: Any) -> Tensor:
    return int8_scaled.compute_linear(name, [*astuple(tile)], *args)


def _conv(name: str, tile: Any, *args: Any) -> Tensor:
    return int8_scaled.compute_conv(name, [*astuple(tile)], *args)


_GEMM = int8_gemm.NAME, int8_gemm.SOURCE, int8_gemm.TILES
_STREAMED = int8_streamed.NAME, int8_streamed.SOURCE, int8_streamed.TILES
_CONV = int8_conv.NAME, int8_conv.SOURCE, int8_conv.TILES
_BOXES = int8_boxes.NAME, int8_boxes.SOURCE, int8_boxes.TILES
# Candidates of a GPU; the first is what is computed without a record.
LINEAR_CALLS = (
    Call(DEFAULT_INT8, int8_scaled.BODIES[ipex.int8_linear.default], always),
    *calls(*_GEMM, partial(_linear, "gemm"), partial(_of_layer, _why_not_gemm)),
    *calls(*_STREAMED, partial(_linear, "streamed"), partial(_of_layer, _why_not_streamed)),
    *calls(*_CONV, partial(_linear, "conv"), partial(_of_layer, _why_not_gathered_rows)),
)
_PIXELS_BY_GEMM = partial(_of_image, partial(_of_pixels, _why_not_gemm))
_PIXELS_IN_STREAMS = partial(_of_image, partial(_of_pixels, _why_not_streamed))
CONV_CALLS = (
    Call(DEFAULT_INT8, int8_scaled.BODIES[ipex.int8_conv.default], always),
    *calls(*_GEMM, partial(_conv, "gemm"), _PIXELS_BY_GEMM),
    *calls(*_STREAMED, partial(_conv, "streamed"), _PIXELS_IN_STREAMS),
    *calls(*_CONV, partial(_conv, "conv"), partial(_of_image, _why_not_gathered)),
    *calls(*_BOXES, partial(_conv, "boxes"), partial(_of_image, _why_not_boxes)),
)


def register() -> None:
    """Add the lowerings to Inductor's registry."""
    register_by_name(ipex.int8_scaled_gemm.default, _lower_gemm)
    register_by_name(ipex.int8_scaled_conv.default, _lower_conv)
