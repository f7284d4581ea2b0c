"""Triton template of a convolution of many channels by TMA tiles (Hopper).

A block of pixels is a TMA tile of images, lines and columns; a tap reads another tile, which TMA
fetches, with zeros outside of the image: no addresses, no masks. The weight is the left factor:
Triton reads an operand that has to be reshaped, as a TMA tile has to be to rows, from shared memory
in place only if it is the right one; a left one goes through registers. Programs are persistent, as
in `persistent.py`.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ipex_inductor.templates.conv_geometry import geometry
from ipex_inductor.templates.kernel_text import read_kernel_text

SOURCE = read_kernel_text("triton/conv_tma.py.jinja")


@dataclass(frozen=True)
class Tile:
    """Output pixels (M) and channels (N) of a block, its warps and stages."""

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int

    def shared(self, terms: int, itemsize: int) -> int:
        """Return the bytes of shared memory of the stages, and of the final transposition."""
        return self.num_stages * (self.BLOCK_M + self.BLOCK_N) * terms * itemsize + 9000


# The fastest of 24 to 100 on an H200 for a 3x3 of ResNet-50 or a U-Net. A kernel alone,
# with bias and relu, was 0.9 to 1.14 times as fast as cuDNN's.
TILES = (
    Tile(256, 64, 8, 4),
    Tile(128, 128, 8, 3),
    Tile(128, 128, 4, 3),
    Tile(128, 128, 4, 4),
    Tile(128, 256, 8, 3),
)
NARROWEST = 64  # columns that a warp group multiplies
FEWEST_TERMS, TERMS = 16, 64  # channels of a step, of which C is a multiple; 64 are 128 bytes
VECTOR = 16  # bytes; the alignment of a tensor that TMA needs
MOST_PLACES = 49


def fits(tile: Tile, out_channels: int) -> bool:
    """Return whether a block is no wider than the result."""
    return max(NARROWEST, 1 << (out_channels - 1).bit_length()) >= tile.BLOCK_N


def terms_of(channels: int) -> int:
    """Return the channels of a step: a divisor, so that no step reads another tap's."""
    return min(TERMS, channels & -channels)


def box(pixels: int, batch: int, height: int, width: int) -> tuple[int, int, int]:
    """Return the images, lines and columns of a TMA tile of so many pixels.

    It leaves the least of all blocks empty; of several, it has the fewest images and the most equal
    sides, whose taps share most of what they read.
    """

    def waste(sides: tuple[int, int, int]) -> tuple[int, int, int]:
        images, lines, columns = sides
        blocks = -(-batch // images) * -(-height // lines) * -(-width // columns)
        return blocks, images, abs(columns - lines)

    sides = [1 << n for n in range(pixels.bit_length())]
    pairs = itertools.product(sides, repeat=2)
    return min(((pixels // (h * w), h, w) for h, w in pairs if h * w <= pixels), key=waste)


def constants(
    batch: int,
    image: Sequence[int],
    out_channels: int,
    window: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    tile: Tile,
    programs: int,
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
        programs: how many fit on the device at once.
    """
    shape_constants = geometry(image, window, stride, padding, dilation)
    sizes = batch, shape_constants["OUT_H"], shape_constants["OUT_W"]
    terms = terms_of(image[0])
    return {
        "OUT_C": out_channels,
        **shape_constants,
        **blocks(sizes, out_channels, tile, programs),
        # Padding as whole strides, so that nothing negative is divided.
        "ABOVE": -(-padding[0] // stride[0]),
        "BESIDE": -(-padding[1] // stride[1]),
        "STEPS": -(-image[0] // terms),
        "STAGES": tile.num_stages,
        "BLOCK_M": tile.BLOCK_M,
        "BLOCK_N": tile.BLOCK_N,
        "BLOCK_K": terms,
    }


def blocks(
    sizes: tuple[int, int, int], out_channels: int, tile: Tile, programs: int
) -> dict[str, int]:
    """Return the constants that divide a result into TMA tiles, and these among programs."""
    sides = box(tile.BLOCK_M, *sizes)
    boxes = [-(-size // side) for size, side in zip(sizes, sides, strict=True)]
    columns = -(-out_channels // tile.BLOCK_N)
    count = boxes[0] * boxes[1] * boxes[2] * columns
    return {
        "BATCH": sizes[0],
        **dict(zip(("BOX_N", "BOX_H", "BOX_W"), sides, strict=True)),
        "BOXES_H": boxes[1],
        "BOXES_W": boxes[2],
        "BLOCKS_N": columns,
        "BLOCKS": count,
        "PROGRAMS": min(programs, count),
    }
