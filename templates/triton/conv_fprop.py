"""Triton template of a convolution of many channels: a GEMM for each tap, one after the other.

With a 1x1 kernel it is a single GEMM of the activation's own rows. Taps are unrolled, and only the
loop over channels is a loop: Triton 3.6 is known to miscompile one loop over both if a block has 8
warps.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ipex_inductor.ops.conv.geometry import sides
from ipex_inductor.templates.conv_geometry import geometry
from ipex_inductor.templates.kernel_text import read_kernel_text

SOURCE = read_kernel_text("triton/conv_fprop.py.jinja")


@dataclass(frozen=True)
class Tile:
    """Output pixels (M), channels (N) and K of a program's step; its warps and stages."""

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    num_warps: int
    num_stages: int


# The winners of 26 of the records of the H200 are of the first two and of 128 x 32.
TILES = (
    Tile(128, 64, 32, 4, 4),
    Tile(64, 64, 64, 4, 4),
    Tile(128, 64, 64, 4, 3),
    Tile(128, 128, 64, 8, 3),
    Tile(128, 256, 64, 8, 3),
    Tile(128, 32, 64, 4, 4),
    Tile(256, 32, 64, 8, 3),
)
# For Intel's GPUs, with 16 lanes a warp: so many warps that nothing spills of 256 registers a
# thread (`benchmarks/studies/triton_xe.py`). None was timed.
XE_TILES = (
    Tile(64, 64, 32, 16, 2),
    Tile(64, 64, 64, 32, 2),
    Tile(32, 64, 64, 16, 2),
    Tile(64, 32, 64, 8, 2),
)
# Operations a byte. On an H200 plain tiles of Triton beat cuDNN's fused convolution where there
# were 28, 43 and 85, and lost to it where there were 21, 57, 113 and more.
MOST_INTENSE = 100
# cuDNN is slow for so few output channels: 3x3 of 128 to 32 (DenseNet) at 198 of 989 Tflop/s.
NARROW = 32
MOST_PLACES = 9  # taps that are unrolled
FEWEST_CHANNELS = 16  # or a step is mostly padding


def fits(tile: Tile, channels: int, out_channels: int) -> bool:
    """Return whether a block is no wider than the result, and as deep as the channels need."""
    wide = (
        out_channels <= NARROW if tile.BLOCK_N == NARROW else max(64, out_channels) >= tile.BLOCK_N
    )
    return wide and (64 if channels > 32 else 32) == tile.BLOCK_K


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
    """Return the constants that the template is rendered with, except ALLOW_TF32.

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
    out_height, out_width = sides(image[1:], window, stride, padding, dilation)
    return {
        "DENSE": (*window, *stride, *padding) == (1, 1, 1, 1, 0, 0),
        "PIXELS": batch * out_height * out_width,
        "OUT_C": out_channels,
        "BLOCKS_N": -(-out_channels // tile.BLOCK_N),
        **geometry(image, window, stride, padding, dilation),
        "BLOCK_M": tile.BLOCK_M,
        "BLOCK_N": tile.BLOCK_N,
        "BLOCK_K": tile.BLOCK_K,
    }
