"""Our Triton templates of convolutions: candidates beside a library's calls, lowered where chosen.

Each is an `ipex::` op without bias and epilogue. Inductor fuses them into the kernel.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor
from torch._inductor import ir
from torch._inductor.lowering import register_lowering
from torch._inductor.virtualized import V

from ipex_inductor import compat
from ipex_inductor.autotune.record import Problem
from ipex_inductor.lowerings.common.calls import DTYPES, is_channels_last
from ipex_inductor.lowerings.common.registering import register_by_name
from ipex_inductor.lowerings.common.templated import (
    Grid,
    apply_epilogue,
    calls,
    dense,
    is_xe,
    node,
    template,
    why_no_product,
)
from ipex_inductor.lowerings.problem.workload import empty, operands_by_name
from ipex_inductor.ops.common.defining import Arguments
from ipex_inductor.ops.conv.conv import ConvArgs
from ipex_inductor.ops.conv.depthwise import taps
from ipex_inductor.ops.conv.geometry import image_of, rows_of, sides
from ipex_inductor.ops.conv.grouped import Blocks
from ipex_inductor.ops.conv.small_channel import runs, to_matrix
from ipex_inductor.templates.triton import (
    conv_depthwise,
    conv_grouped,
    conv_small_channel,
    conv_strips,
)

FEW_CHANNELS = 4
# Triton truncates fp32 to TF32 where libraries round. Its error exceeds what verification allows.
NO_TF32 = "fp32 GEMMs are slow without TF32"
STAGES = 2  # for templates without a loop, where nothing can be pipelined


def why_not_ours(problem: Problem) -> str | None:
    """Return why none of our convolution templates can compute `problem`, or None."""
    operands, constants = operands_by_name(problem), problem.constants
    x, weight = operands["x"], operands["weight"]
    if not problem.arch.startswith(("sm_", "gfx", "xe:")):
        return f"our templates are not for {problem.arch}"
    if problem.symbols:
        return "its sizes vary"
    if constants["transposed"] or len(x.shape) != 4:
        return "it is transposed or not 2-D"
    if {len(ints(constants[name])) for name in ("stride", "dilation")} != {2}:
        return "its stride or dilation is one number for both dimensions"
    dtypes = {operand.dtype for operand in operands.values()}
    if len(dtypes) != 1 or not dtypes <= DTYPES:
        return f"no template supports it in {', '.join(sorted(dtypes))}"
    if any(size == 0 for operand in operands.values() for size in operand.shape):
        return "a size is zero"
    if "other" in operands and not is_channels_last(operands["other"]):
        return "its addend is not channels-last"
    if not is_channels_last(weight) and not is_channels_last(x):
        return "its result is not channels-last"
    return None


def why_not_multiplied(problem: Problem) -> str | None:
    """Return why no GEMM template of many channels can compute `problem`, or None."""
    x = operands_by_name(problem)["x"]
    if reason := why_not_ours(problem):
        return reason
    if x.dtype == "float32":
        return NO_TF32
    if no_product := why_no_product(problem.arch, x.dtype):
        return no_product
    return None if is_channels_last(x) else "its input is not channels-last"


def expand_padding(padding: Any) -> list[int]:
    """Return the padding of rows and of columns; "valid" is given as one zero."""
    return [*padding] * 2 if len(padding) == 1 else [*padding]


def kernel(
    name: str,
    source: str,
    grid: Grid,
    inputs: tuple[Any, ...],
    warps: int,
    given: Mapping[str, Any],
    stages: int = STAGES,
) -> Any:
    """Return the template as a node into which Inductor fuses the epilogue.

    Args:
        name: name of the template, without `ipex_`.
        source: source of the template.
        grid: grid of programs.
        inputs: activation and weight.
        warps: warps of a program.
        given: constants of the template.
        stages: pipeline stages of the template.
    """
    x, _ = inputs
    size = ints(V.graph.current_node.meta["val"].shape)
    result = ir.FixedLayout(x.get_device(), x.get_dtype(), size)
    kernel_template = template(f"ipex_{name}", source, grid)
    return node(kernel_template, inputs, result, warps, stages, ALLOW_TF32=False, **given)


def with_epilogue(
    rows: Tensor,
    like: Tensor,
    size: Sequence[int],
    bias: Tensor | None,
    other: Tensor | None,
    epilogue: tuple[str, str, Sequence[float]],
) -> Tensor:
    """Return the activation made of `rows` [B * H * W, N], with bias and epilogue as torch ops.

    These ops work on rows too, as Inductor only fuses loops of the template's shape into it.

    Args:
        rows: unrounded sums.
        like: activation that has the dtype and batch of the result.
        size: height and width of the result.
        bias: bias [N], or None.
        other: addend of the epilogue, or None.
        epilogue: binary op, unary op, and its scalars.
    """
    if bias is not None:
        rows = rows + bias
    addend = other if other is None else rows_of(other)
    return image_of(apply_epilogue(rows, like.dtype, addend, *epilogue), len(like), *size)


# Convolutions of few channels.


def _why_not_stem(tile: conv_small_channel.Tile, problem: Problem) -> str | None:
    operands, constants = operands_by_name(problem), problem.constants
    x, weight = operands["x"], operands["weight"]
    if len(weight.shape) == 4 and (int(weight.shape[1]) > FEW_CHANNELS or constants["groups"] != 1):
        return "it is grouped or has too many channels for the small-channel template"
    reason = why_not_ours(problem)
    if reason is not None:
        return reason
    if no_product := why_no_product(problem.arch, x.dtype):
        return no_product
    last = is_channels_last(x)
    if not last and not empty(x, torch.device("meta")).is_contiguous():
        return "its input is neither channels-last nor contiguous"
    if constants["dilation"] != (1, 1):
        return "its kernel is dilated"
    image, window = ints(x.shape[1:]), ints(weight.shape[2:])
    patch_runs = runs(
        image, window, ints(constants["stride"]), expand_padding(ints(constants["padding"])), last
    )
    widest = conv_small_channel.XE_WIDEST if is_xe(problem.arch) else conv_small_channel.WIDEST
    fits = conv_small_channel.fits(tile, int(weight.shape[0]), patch_runs, widest)
    return None if fits else "the tile does not fit"


def is_product(problem: Problem) -> bool:
    """Return whether a convolution is a GEMM: 1x1 kernel, stride 1, no padding, one group."""
    weight, constants = operands_by_name(problem)["weight"], problem.constants
    once = {*weight.shape[2:], *ints(constants["stride"])} == {1} and constants["groups"] == 1
    return once and {*ints(constants["padding"])} == {0}


def ints(sizes: Any) -> list[int]:
    """Return static sizes, of a problem or of an Inductor node, as integers."""
    return [int(size) for size in sizes]


def is_last(x: Tensor) -> bool:
    """Return whether an activation is channels-last."""
    return compat.is_channels_last(x)


def stem_matrix(
    tile: Any,
    x: Tensor,
    weight: Tensor,
    bias: Any,
    other: Any,
    stride: list[int],
    padding: list[int],
    *_: Any,
) -> Tensor:
    """Return the weight as small-channel templates read it.

    Args:
        tile: tile of the template; unused.
        x: activation.
        weight: weight [N, C, h, w].
        bias: unused.
        other: unused.
        stride: stride of both spatial dimensions.
        padding: padding of the spatial dimensions.
    """
    last = is_last(x)
    patch_runs = runs(x.shape[1:], weight.shape[2:], stride, expand_padding(padding), last)
    return to_matrix(weight, patch_runs, last)


def _stem(tile: conv_small_channel.Tile, matrix: Tensor, *args: Any) -> Tensor:
    call = ConvArgs(*args)
    window = [*call.weight.shape[2:]], call.stride, expand_padding(call.padding)
    geometry = *window, is_last(call.x)
    rows = torch.ops.ipex.conv_stem(call.x, matrix, *geometry, [*astuple(tile)])
    return finish_conv(rows, call, sides(call.x.shape[2:], *window))


def _lower_stem(
    x: Any,
    matrix: Any,
    window: list[int],
    stride: list[int],
    padding: list[int],
    last: bool,
    tile: list[int],
) -> Any:
    x, matrix = dense(x, last), dense(matrix)
    chosen = conv_small_channel.Tile(*tile)
    batch, channels, height, width = ints(x.get_size())
    constants = conv_small_channel.constants(
        batch,
        (channels, height, width),
        ints(matrix.get_size())[1],
        window,
        stride,
        padding,
        last,
        chosen,
    )
    return _kernel("stem", (x, matrix), chosen.num_warps, constants)


# Depthwise convolutions: one channel a group.


def _why_not_depthwise(tile: Any, problem: Problem) -> str | None:
    operands, constants = operands_by_name(problem), problem.constants
    x, weight = operands["x"], operands["weight"]
    if constants["groups"] == 1 or not constants["groups"] == x.shape[1] == weight.shape[0]:
        return "it is not a depthwise convolution"
    reason = why_not_ours(problem)
    if reason is not None:
        return reason
    if not is_channels_last(x):
        return "its input is not channels-last"
    taps_ = math.prod(ints(weight.shape[2:]))
    return None if taps_ <= conv_depthwise.MOST_TAPS else "its kernel is too large"


def _taps(tile: Any, x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    return taps(weight)


def _depthwise(
    template: str, tile: conv_depthwise.Tile | conv_strips.Tile, taps_: Tensor, *args: Any
) -> Tensor:
    call = ConvArgs(*args)
    window = geometry_of(call)
    rows = torch.ops.ipex.conv_depthwise(call.x, taps_, *window, template, [*astuple(tile)])
    return finish_conv(rows, call, sides(call.x.shape[2:], *window))


def geometry_of(call: ConvArgs) -> tuple[Any, ...]:
    """Return the size of the kernel, stride, padding and dilation of a convolution over a plane."""
    return [*call.weight.shape[2:]], call.stride, expand_padding(call.padding), call.dilation


def finish_conv(rows: Tensor, call: ConvArgs, size: Sequence[int]) -> Tensor:
    """Return the result of `ipex::conv` from the sums of its kernel, one row per pixel."""
    return with_epilogue(rows, call.x, size, call.bias, call.other, call.epilogue())


def _window(call: Arguments) -> tuple[list[int], list[int], list[int], list[int]]:
    return call.window, call.stride, call.padding, call.dilation


def _lower_depthwise(call: Arguments) -> Any:
    x, taps_ = dense(call.x, last=True), dense(call.taps)
    template_module = {"depthwise": conv_depthwise, "strips": conv_strips}[call.template]
    chosen = template_module.Tile(*call.tile)
    batch, *image = ints(x.get_size())
    constants = template_module.constants(batch, image, *_window(call), chosen)
    return _kernel(call.template, (x, taps_), chosen.num_warps, constants)


# Groups of several channels.


def _why_not_grouped(tile: conv_grouped.Tile, problem: Problem) -> str | None:
    operands, constants = operands_by_name(problem), problem.constants
    x, weight = operands["x"], operands["weight"]
    if constants["groups"] == 1 or constants["groups"] == x.shape[1] == weight.shape[0]:
        return "it has no groups of several channels"
    if reason := why_not_multiplied(problem):
        return reason
    if math.prod(ints(weight.shape[2:])) > conv_grouped.MOST_PLACES:
        return "its kernel is too large"
    if tile.BLOCK_N > conv_grouped.WIDE and not problem.arch.startswith("sm_90"):
        return "its wide tile was measured on Hopper only, whose tensor cores read shared memory"
    fits = conv_grouped.fits(tile, ints(weight.shape), *ints([constants["groups"]]))
    return None if fits else "the tile does not fit"


def _blocks_of(tile: conv_grouped.Tile, weight: Tensor, groups: int) -> Blocks:
    blocks = tile.blocks(weight.shape, groups)
    assert blocks is not None
    return blocks


def _grouped_matrix(tile: conv_grouped.Tile, *args: Any) -> Tensor:
    call = ConvArgs(*args)
    return _blocks_of(tile, call.weight, call.groups).of_weight(call.weight)


def _conv_grouped(tile: conv_grouped.Tile, blocks: Tensor, *args: Any) -> Tensor:
    call = ConvArgs(*args)
    window = geometry_of(call)
    sizes = call.groups, len(call.weight), [*astuple(tile)]
    rows = torch.ops.ipex.conv_grouped(call.x, blocks, *window, *sizes)
    return finish_conv(rows, call, sides(call.x.shape[2:], *window))


def _lower_grouped(call: Arguments) -> Any:
    x, blocks = dense(call.x, last=True), dense(call.blocks)
    chosen = conv_grouped.Tile(*call.tile)
    batch, *image = ints(x.get_size())
    constants = conv_grouped.constants(
        batch, image, call.columns, call.groups, *_window(call), chosen
    )
    return _kernel("grouped", (x, blocks), chosen.num_warps, constants)


# All templates.


def _kernel(name: str, inputs: tuple[Any, ...], warps: int, constants: Mapping[str, Any]) -> Any:
    return kernel(name, SOURCES[name], GRIDS[name], inputs, warps, constants)


SOURCES = {
    "stem": conv_small_channel.SOURCE,
    "depthwise": conv_depthwise.SOURCE,
    "strips": conv_strips.SOURCE,
    "grouped": conv_grouped.SOURCE,
}


def in_blocks(rows: Any, columns: Any, meta: Any, *, cdiv: Any) -> tuple[Any, ...]:
    """Return a grid with a program for each block of M and N."""
    return cdiv(rows, meta["BLOCK_M"]), cdiv(columns, meta["BLOCK_N"]), 1


def counted_grid(rows: Any, columns: Any, meta: Any, *, cdiv: Any) -> tuple[Any, ...]:
    """Return a grid of as many blocks as the constants give, by blocks of N."""
    return meta["BLOCKS"], cdiv(columns, meta["BLOCK_N"]), 1


def in_a_row(rows: Any, columns: Any, meta: Any, *, cdiv: Any) -> tuple[Any, ...]:
    """Return a 1-D grid with blocks of equal pixels next to each other, for cache reuse."""
    return cdiv(rows, meta["BLOCK_M"]) * meta["BLOCKS_N"], 1, 1


GRIDS: dict[str, Grid] = {
    "stem": in_blocks,
    "depthwise": counted_grid,
    "strips": counted_grid,
    "grouped": in_a_row,
}


FAMILIES: dict[str, tuple[Any, ...]] = {
    "stem": (
        conv_small_channel.TILES,
        _stem,
        _why_not_stem,
        stem_matrix,
        conv_small_channel.XE_TILES,
    ),
    "depthwise": (
        conv_depthwise.TILES,
        functools.partial(_depthwise, "depthwise"),
        _why_not_depthwise,
        _taps,
        conv_depthwise.XE_TILES,
    ),
    "strips": (
        conv_strips.TILES,
        functools.partial(_depthwise, "strips"),
        _why_not_depthwise,
        _taps,
    ),
    "grouped": (
        conv_grouped.TILES,
        _conv_grouped,
        _why_not_grouped,
        _grouped_matrix,
        conv_grouped.XE_TILES,
    ),
}
CALLS = tuple(
    call
    for name, family in FAMILIES.items()
    for call in calls(f"ipex.triton.{name}", SOURCES[name], *family)
)


def register() -> None:
    """Add the lowerings of the convolution templates to Inductor's registry."""
    depthwise = torch.ops.ipex.conv_depthwise.default
    register_lowering(torch.ops.ipex.conv_stem.default, type_promotion_kind=None)(_lower_stem)
    register_by_name(depthwise, _lower_depthwise)
    grouped = torch.ops.ipex.conv_grouped.default
    register_by_name(grouped, _lower_grouped)
