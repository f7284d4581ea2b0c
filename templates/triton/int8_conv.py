"""Triton template of a convolution, or a GEMM, on 8-bit integers that gathers its rows.

A GEMM for each tap, as in `conv_fprop.py`. With few channels a line of the window is a GEMM, since
its bytes are adjacent. Zeros stand for pixels outside of the image: where the zero point is another
number, the offsets of such pixels have what these zeros leave out.
"""

import math
from collections.abc import Sequence
from typing import Any

from ipex_inductor.ops.quant.int8_borders import edges_of
from ipex_inductor.ops.quant.int8_operands import MOST_PRODUCT
from ipex_inductor.templates.kernel_text import read_kernel_text
from ipex_inductor.templates.triton import conv_fprop
from ipex_inductor.templates.triton.conv_fprop import Tile

NAME = "ipex.triton.int8_conv"

SOURCE = read_kernel_text("triton/int8_conv.py.jinja")

TILES = (
    Tile(128, 128, 128, 8, 3),
    Tile(128, 128, 64, 8, 4),
    Tile(128, 64, 128, 4, 3),
    Tile(128, 64, 64, 4, 4),
    Tile(64, 64, 64, 4, 4),
    Tile(64, 64, 128, 4, 3),
    Tile(128, 64, 32, 4, 4),
    Tile(64, 64, 32, 4, 4),
    Tile(256, 64, 32, 8, 3),
    Tile(32, 64, 128, 4, 4),
    Tile(16, 64, 128, 4, 4),
    Tile(16, 64, 64, 4, 4),
    Tile(16, 64, 32, 4, 4),
)
MANY_CHANNELS = 32  # K of an instruction, which fewer channels leave partly empty
LONGEST_LINE = 128  # bytes of such a line
MOST_PLACES = 49  # taps that are unrolled


def depth_of(channels: int, window: Sequence[int], dilation: Sequence[int]) -> int:
    """Return the bytes of a step: K of a tap, or of a line of the window."""
    return channels * window[1] if has_lines(channels, window, dilation) else channels


def has_lines(channels: int, window: Sequence[int], dilation: Sequence[int]) -> bool:
    """Return whether a line of the window, which is adjacent bytes, is multiplied at once."""
    few = channels < MANY_CHANNELS and channels * window[1] <= LONGEST_LINE
    return few and dilation[1] == 1 and {*window} != {1}


def fits(tile: Tile, rows: int, columns: int, depth: int, lines: bool) -> bool:
    """Return whether a block is neither larger than the result nor deeper than a step needs.

    Args:
        tile: the block sizes.
        rows: M.
        columns: N.
        depth: K of a step.
        lines: whether a step is a line of the window, which is multiplied whole.
    """
    tall = max(16, 1 << (rows - 1).bit_length()) >= tile.BLOCK_M
    wide = max(64, 1 << (columns - 1).bit_length()) >= tile.BLOCK_N
    deepest = max(32, min(128, 1 << (depth - 1).bit_length()))
    least = deepest if lines else max(32, deepest // 2)
    return tall and wide and least <= tile.BLOCK_K <= deepest


def choose_tile(rows: int, columns: int, depth: int, lines: bool, multiprocessors: int) -> Tile:
    """Return the largest tile that fits and leaves no multiprocessor without a block.

    Args:
        rows: M.
        columns: N.
        depth: K of a step.
        lines: whether a step is a line of the window.
        multiprocessors: of the device.
    """

    def blocks(tile: Tile) -> int:
        return -(-rows // tile.BLOCK_M) * -(-columns // tile.BLOCK_N)

    fitting = [tile for tile in TILES if fits(tile, rows, columns, depth, lines)]
    busy = [tile for tile in fitting if blocks(tile) >= multiprocessors]
    if busy:
        return max(busy, key=lambda tile: (tile.BLOCK_M * tile.BLOCK_N, tile.BLOCK_K))
    return max(fitting, key=lambda tile: (blocks(tile), tile.BLOCK_K))


def constants(
    batch: int,
    image: Sequence[int],
    out_channels: int,
    window: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    tile: Tile,
) -> dict[str, Any]:
    """Return the constants that the template is rendered with.

    Args:
        batch: the number of images.
        image: [C, H, W] of the input.
        out_channels: the channels of the result.
        window: [h, w] of the kernel.
        stride: of the kernel.
        padding: of the input.
        dilation: of the kernel.
        tile: the block sizes.
    """
    shape = batch, image, out_channels, window, stride, padding, dilation
    lines = has_lines(image[0], window, dilation)
    if lines and depth_of(image[0], window, dilation) > tile.BLOCK_K:
        raise ValueError(f"a step of {tile.BLOCK_K} is shorter than a line of the window")
    return {
        **conv_fprop.constants(*shape, tile),
        "LINES": lines,
        "MOST_SUM": math.prod((image[0], *window)) * MOST_PRODUCT,
        "EDGES": edges_of(image[1:], window, stride, padding, dilation),
    }
