"""Triton template of a small-channel convolution: the GEMM of `ops/conv/small_channel.py`.

Its left matrix is never in memory: the kernel loads the elements of each block from the image.
On an image of three channels a window of 7 x 7 has K = 147, which padded to 160 is five steps of a
GEMM. Runs of adjacent elements begin at even places, so that a load takes two of them or more.
Steps are unrolled: the loads of the next one stand before the GEMM of this one, and Triton 3.6 is
known to miscompile flattened loops over K if a block has 8 warps. So there are 4 at most, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ipex_inductor.ops.conv.geometry import sides
from ipex_inductor.ops.conv.small_channel import TERMS, Runs, runs
from ipex_inductor.templates.kernel_text import read_kernel_text

SOURCE = read_kernel_text("triton/conv_small_channel.py.jinja")


@dataclass(frozen=True)
class Tile:
    """Output pixels (M), channels (N) and K that a program takes at a time, and its warps."""

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    num_warps: int = 4


# 90 to 170 registers on sm_90, no spills; the winners of 28 of the records of the H200.
TILES = (
    Tile(64, 16, 32),
    Tile(128, 16, 32),
    Tile(64, 32, 32),
    Tile(128, 32, 32),
    Tile(128, 64, 16),
    Tile(64, 64, 32),
    Tile(128, 64, 32),
    Tile(64, 64, 64),
    Tile(64, 128, 32),
    Tile(64, 128, 64),
)
# For Intel's GPUs, with 16 lanes a warp: so many warps that nothing spills of 256 registers a
# thread (`benchmarks/studies/triton_xe.py`). None was timed.
XE_TILES = (
    Tile(64, 16, 32, 4),
    Tile(128, 16, 32, 8),
    Tile(64, 32, 32, 8),
    Tile(128, 32, 32, 16),
    Tile(64, 64, 32, 16),
)
NARROWEST, WIDEST, XE_WIDEST = 16, 128, 64  # channels of a block
MOST_STEPS = 24  # steps that are unrolled


def fits(tile: Tile, out_channels: int, found: Runs, widest: int = WIDEST) -> bool:
    """Return whether `tile` is as wide as the channels, and few of its steps cover a window."""
    width = min(widest, max(NARROWEST, 1 << (out_channels - 1).bit_length()))
    return width == tile.BLOCK_N and found.terms // tile.BLOCK_K <= MOST_STEPS


def constants(
    batch: int,
    image: Sequence[int],
    out_channels: int,
    window: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    last: bool,
    tile: Tile,
) -> dict[str, Any]:
    """Return the constants that the template is rendered with, except ALLOW_TF32.

    Args:
        batch: the number of images.
        image: [C, H, W] of the input.
        out_channels: the channels of the result.
        window: its size [h, w].
        stride: of the window, by side.
        padding: of the input, by side.
        last: whether the input is channels-last (the channel is the last dimension in memory).
        tile: the block sizes.
    """
    element_runs = runs(image, window, stride, padding, last)
    assert TERMS % tile.BLOCK_K == 0
    return {
        **make_gather_constants(batch, image, window, stride, padding, last),
        "OUT_C": out_channels,
        "STEPS": -(-element_runs.count * element_runs.width // tile.BLOCK_K),
        "BLOCK_M": tile.BLOCK_M,
        "BLOCK_N": tile.BLOCK_N,
        "BLOCK_K": tile.BLOCK_K,
    }


def make_gather_constants(
    batch: int,
    image: Sequence[int],
    window: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    last: bool,
) -> dict[str, int]:
    """Return the constants that locate the elements of a window in an image.

    Args:
        batch: the number of images.
        image: [C, H, W] of the input.
        window: its size [h, w].
        stride: of the window, by side.
        padding: of the input, by side.
        last: whether the input is channels-last (the channel is the last dimension in memory).
    """
    channels, height, width = image
    unit = channels if last else 1
    element_runs = runs(image, window, stride, padding, last)
    out_height, out_width = sides(image[1:], window, stride, padding)
    return {
        "PIXELS": batch * out_height * out_width,
        "OUT_H": out_height,
        "OUT_W": out_width,
        "IN_H": height,
        "IN_W": width * unit,
        "IMAGE": channels * height * width,
        "PLANE": 0 if last else height * width,
        "LINE": width * unit,
        "STEP": stride[1] * unit,
        "STRIDE_H": stride[0],
        "PADDING_H": padding[0],
        "BEFORE": padding[1] * unit + element_runs.shift,
        "WINDOW_H": window[0],
        "RUNS": element_runs.count,
        "LENGTH": element_runs.length,
        "SHIFT": element_runs.shift,
        "WIDTH": element_runs.width,
    }
