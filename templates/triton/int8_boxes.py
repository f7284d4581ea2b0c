"""Triton template of a convolution on 8-bit integers by TMA tiles (Hopper), as `conv_tma.py` is.

TMA has zeros outside of the image: where the zero point is another number, the offsets of pixels at
the border have what these zeros leave out.
"""

import math
from collections.abc import Sequence
from typing import Any

from ipex_inductor.ops.quant.int8_borders import edges_of
from ipex_inductor.ops.quant.int8_operands import MOST_PRODUCT
from ipex_inductor.templates.kernel_text import read_kernel_text
from ipex_inductor.templates.triton import conv_tma
from ipex_inductor.templates.triton.conv_tma import Tile

NAME = "ipex.triton.int8_boxes"

SOURCE = read_kernel_text("triton/int8_boxes.py.jinja")

TILES = (
    Tile(256, 64, 8, 3),
    Tile(128, 128, 8, 4),
    Tile(128, 128, 4, 3),
    Tile(128, 64, 4, 4),
    Tile(64, 128, 4, 4),
)
FEWEST_TERMS, TERMS = 32, 128  # channels of a step, of which C is a multiple; 128 bytes


def terms_of(channels: int) -> int:
    """Return the channels of a step: a divisor, so that no step reads another tap's."""
    return min(TERMS, channels & -channels)


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
        programs: how many fit on the device at once.
    """
    shape = batch, image, out_channels, window, stride, padding, dilation
    terms = terms_of(image[0])
    return {
        **conv_tma.constants(*shape, tile, programs),
        "STEPS": image[0] // terms,
        "BLOCK_K": terms,
        "MOST_SUM": math.prod((image[0], *window)) * MOST_PRODUCT,
        "EDGES": edges_of(image[1:], window, stride, padding, dilation),
    }
