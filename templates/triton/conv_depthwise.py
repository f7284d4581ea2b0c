"""Triton template of a depthwise convolution, which is bound by memory and by loads.

A program computes some rows of some columns of an image, for adjacent channels. For a column of the
kernel it holds the weights of all rows; each row of the image is loaded once for that column, and
added to all rows of the result that it takes part in.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ipex_inductor.ops.conv.geometry import sides
from ipex_inductor.templates.conv_geometry import geometry
from ipex_inductor.templates.kernel_text import read_kernel_text

SOURCE = read_kernel_text("triton/conv_depthwise.py.jinja")


@dataclass(frozen=True)
class Tile:
    """Rows (2 or 4), columns and channels that a program computes, and its warps."""

    BLOCK_H: int
    BLOCK_W: int
    BLOCK_N: int
    num_warps: int


# By the instructions of sm_90: 96 to 176 registers, no shared memory.
TILES = (
    Tile(4, 8, 64, 2),
    Tile(4, 16, 64, 4),
    Tile(4, 8, 32, 1),
)
# For Intel's GPUs, with 16 or 32 lanes a warp: more warps, so that nothing spills
# (`benchmarks/studies/triton_xe.py`). None was timed.
XE_TILES = (
    Tile(4, 8, 64, 8),
    Tile(4, 4, 64, 8),
    Tile(2, 8, 64, 8),
    Tile(2, 4, 32, 4),
)
MOST_TAPS = 49  # taps that are unrolled


def constants(
    batch: int,
    image: Sequence[int],
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
        window: [h, w] of the kernel.
        stride: of the kernel.
        padding: of the input.
        dilation: of the kernel.
        tile: the block sizes.
    """
    out_height, out_width = sides(image[1:], window, stride, padding, dilation)
    blocks = -(-out_height // tile.BLOCK_H), -(-out_width // tile.BLOCK_W)
    return {
        "BLOCKS": batch * blocks[0] * blocks[1],
        "BLOCKS_H": blocks[0],
        "BLOCKS_W": blocks[1],
        **geometry(image, window, stride, padding, dilation),
        "BLOCK_M": tile.BLOCK_H * tile.BLOCK_W,
        "BLOCK_H": tile.BLOCK_H,
        "BLOCK_W": tile.BLOCK_W,
        "BLOCK_N": tile.BLOCK_N,
    }
