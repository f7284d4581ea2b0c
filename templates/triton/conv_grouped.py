"""Triton template of a grouped convolution with several channels a group: a GEMM for each tap.

A block of the result covers as many groups as fit into it; its weight has zeros where a channel
meets another group's (`ops/conv/grouped.py`). So each tap is a small GEMM on tensor cores. If a
channel is infinite, zeros make NaN of it: then the block is computed again, group by group.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ipex_inductor.ops.conv.geometry import sides
from ipex_inductor.ops.conv.grouped import Blocks
from ipex_inductor.templates.conv_geometry import geometry
from ipex_inductor.templates.kernel_text import read_kernel_text

SOURCE = read_kernel_text("triton/conv_grouped.py.jinja")


@dataclass(frozen=True)
class Tile:
    """Output pixels (M), channels (N) and K that a program takes at a time; its warps."""

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    num_warps: int

    def blocks(self, shape: Sequence[int], groups: int) -> Blocks | None:
        """Return the layout of a weight [O, C / groups, h, w] in blocks; None if no group fits."""
        return Blocks.fit(shape, groups, self.BLOCK_K, self.BLOCK_N)


# Of 24 and 48 channels a group the best two of each problem are within 18 %.
TILES = (
    Tile(128, 16, 16, 4),
    Tile(256, 16, 16, 4),
    Tile(64, 32, 32, 4),
    Tile(128, 32, 32, 4),
    Tile(256, 32, 32, 8),
    Tile(64, 64, 64, 4),
    Tile(128, 64, 64, 8),  # by four warps it spills, on an A100 and in Triton 3.9
    Tile(128, 128, 128, 8),  # 72 channels a group: 370 us on an H100, by 64 pixels 621, cuDNN 635
)
# For Intel's GPUs, with 16 lanes a warp: so many warps that nothing spills
# (`benchmarks/studies/triton_xe.py`). None was timed.
XE_TILES = (
    Tile(64, 16, 16, 4),
    Tile(128, 16, 16, 8),
    Tile(64, 32, 32, 8),
    Tile(128, 32, 32, 16),
)
LEAST = 16  # K and N of a GEMM on tensor cores
MOST_GROUPS = 4  # groups of a larger block, whose rest is zeros; not measured either
WIDE = 64  # columns; a wider block would be mostly zeros
MOST_PLACES = 25  # taps that are unrolled


def fits(tile: Tile, shape: Sequence[int], groups: int) -> bool:
    """Return whether few groups fill over half of a block, or there is no smaller block."""
    weight_blocks = tile.blocks(shape, groups)
    if weight_blocks is None:
        return False
    least = tile.BLOCK_N == tile.BLOCK_K == LEAST
    columns, terms = weight_blocks.size * (shape[0] // groups), weight_blocks.size * shape[1]
    filled = 2 * columns > tile.BLOCK_N and 2 * terms > tile.BLOCK_K
    most = 1 if tile.BLOCK_N > WIDE else MOST_GROUPS
    return least or (filled and weight_blocks.size <= most)


def constants(
    batch: int,
    image: Sequence[int],
    out_channels: int,
    groups: int,
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
        groups: the number of groups.
        window: [h, w] of the kernel.
        stride: of the kernel.
        padding: of the input.
        dilation: of the kernel.
        tile: the block sizes.
    """
    out_height, out_width = sides(image[1:], window, stride, padding, dilation)
    group_channels = image[0] // groups
    blocks = tile.blocks((out_channels, group_channels, *window), groups)
    assert blocks is not None
    return {
        "PIXELS": batch * out_height * out_width,
        "OUT_C": out_channels,
        "PLACES": window[0] * window[1],
        "SIZE": blocks.size,
        "TERMS": group_channels,
        "COLUMNS": out_channels // groups,
        "BLOCKS_N": blocks.count,
        **geometry(image, window, stride, padding, dilation),
        "BLOCK_M": tile.BLOCK_M,
        "BLOCK_N": tile.BLOCK_N,
        "BLOCK_K": tile.BLOCK_K,
    }
