"""Triton template of a small-channel convolution with ReLU and a max pool after it, in one kernel.

A program goes down an image, a line of the convolution at a time, by the GEMM of
`templates/triton/conv_small_channel.py`. It keeps the maximum of lines, rounded as a separate
convolution would round it, so for 3 x 3 windows with stride 2 each line is computed once. Of a
window's three columns two are a pair; the third is the first of the next pair, which `tl.gather`
fetches.

K and edges are counted again in each line, from a zero that the compiler cannot see: otherwise it
would keep them all in registers, which would then suffice for three programs a multiprocessor
instead of four.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ipex_inductor.ops.conv.geometry import sides
from ipex_inductor.ops.conv.small_channel_pool import AROUND, STEP, WINDOW
from ipex_inductor.templates.kernel_text import read_kernel_text
from ipex_inductor.templates.triton import conv_small_channel

SOURCE = read_kernel_text("triton/conv_small_channel_pool.py.jinja")


@dataclass(frozen=True)
class Tile:
    """Columns of the convolution, channels and K of a step, lines of the result, and warps."""

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    BLOCK_H: int
    num_warps: int = 4


# A line is fastest with 64 columns, K = 32 and 4 warps: with 128 columns, 8 warps or K = 16 an H200
# took a tenth more and up to twice as long.
TILES = tuple(Tile(64, wide, 32, lines) for wide in (32, 64) for lines in (16, 8, 4, 2))
NARROWEST, WIDEST = 32, 64  # channels of a block


def fits(tile: Tile, out_channels: int, terms: int) -> bool:
    """Return whether `tile` is as wide as the channels, and few of its steps cover a kernel."""
    width = min(WIDEST, max(NARROWEST, 1 << (out_channels - 1).bit_length()))
    return width == tile.BLOCK_N and terms // tile.BLOCK_K <= conv_small_channel.MOST_STEPS


def pooled_size(size: Sequence[int]) -> tuple[int, int]:
    """Return the height and width of the pool's result for a convolution's height and width."""
    return sides(size, (WINDOW,) * 2, (STEP,) * 2, (AROUND,) * 2)


def constants(
    batch: int,
    image: Sequence[int],
    out_channels: int,
    window: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    last: bool,
    tile: Tile,
    biased: bool,
    ptx: bool,
) -> dict[str, Any]:
    """Return the constants that the template is rendered with, except ALLOW_TF32.

    Args:
        batch: the number of images.
        image: [C, H, W] of the input.
        out_channels: the channels of the result.
        window: [h, w] of the kernel.
        stride: of the kernel.
        padding: of the input.
        last: whether the input is channels-last.
        tile: the block sizes.
        biased: whether there is a bias.
        ptx: whether inline assembly of NVIDIA GPUs may be used.
    """
    conv_tile = conv_small_channel.Tile(tile.BLOCK_M, tile.BLOCK_N, tile.BLOCK_K)
    options = window, stride, padding, last, conv_tile
    conv_constants = conv_small_channel.constants(batch, image, out_channels, *options)
    height, width = pooled_size((conv_constants["OUT_H"], conv_constants["OUT_W"]))
    # A column more than the pairs is read on the left, before the first pair.
    blocks = -(-width // ((tile.BLOCK_M - 1) // 2))
    groups = -(-height // tile.BLOCK_H)
    return {
        **conv_constants,
        "POOL_H": height,
        "POOL_W": width,
        "POOLED": -(-width // blocks),
        "BLOCKS_W": blocks,
        "GROUPS": groups,
        "BLOCKS": batch * blocks * groups,
        "BIASED": biased,
        "PTX": ptx,
        "BLOCK_H": tile.BLOCK_H,
    }
