"""Triton templates of two added GEMMs: a 1x1 convolution and that of its residual shortcut.

Unfused, the shortcut's result is written and read again, which is most of the memory traffic of
both. In `STREAMED` both weights stay in shared memory, as in `weight_stationary.py`; in `BOXES`, by
TMA tiles, they do not have to fit, as in `conv_tma.py`.
"""

from collections.abc import Sequence
from typing import Any

from ipex_inductor.templates.kernel_text import read_kernel_text
from ipex_inductor.templates.triton import conv_tma, weight_stationary

STREAMED = read_kernel_text("triton/residual_streamed.py.jinja")

# Each sum has a pipeline of its own: a load that depends on whose turn it is would have none.
BOXES = read_kernel_text("triton/residual_boxes.py.jinja")

# The fastest of 5 to 6 each on an H200, for the four shortcuts of ResNet-50 with 128 images.
STREAMED_TILES = (
    weight_stationary.Tile(64, 128, 4, 3, 2),
    weight_stationary.Tile(64, 256, 4, 3, 1),
    weight_stationary.Tile(128, 128, 8, 3, 1),
)
BOXES_TILES = (
    conv_tma.Tile(128, 128, 4, 3),
    conv_tma.Tile(128, 128, 8, 3),
)


def shared(tile: weight_stationary.Tile, terms: int, other_terms: int, itemsize: int) -> int:
    """Return the bytes of shared memory of `STREAMED`: weights, stages of both inputs, a result."""
    both = weight_stationary.depth(terms) + weight_stationary.depth(other_terms)
    return itemsize * (tile.BLOCK_N * both + tile.BLOCK_M * (tile.num_stages * both + tile.BLOCK_N))


def constants(
    batch: int,
    image: Sequence[int],
    source: Sequence[int],
    out_channels: int,
    stride: Sequence[int],
    tile: weight_stationary.Tile | conv_tma.Tile,
    programs: int,
) -> dict[str, Any]:
    """Return the constants that the template is rendered with, except ALLOW_TF32.

    Args:
        batch: the number of images.
        image: [C, H, W] of the input.
        source: [D, H', W'] of the shortcut's input.
        out_channels: the channels of the result.
        stride: of the shortcut.
        tile: the block sizes.
        programs: how many fit on the device at once.
    """
    values = {
        "OUT_C": out_channels,
        "BIASED": True,
        "TERMS": image[0],
        "OTHER_TERMS": source[0],
        "OUT_H": image[1],
        "OUT_W": image[2],
        "IN_H": source[1],
        "IN_W": source[2],
        "STRIDE_H": stride[0],
        "STRIDE_W": stride[1],
        "STAGES": tile.num_stages,
        "BLOCK_M": tile.BLOCK_M,
        "BLOCK_N": tile.BLOCK_N,
    }
    if isinstance(tile, conv_tma.Tile):
        sizes = batch, image[1], image[2]
        steps = map(conv_tma.terms_of, (image[0], source[0]))
        values |= conv_tma.blocks(sizes, out_channels, tile, programs)
        return values | dict(zip(("BLOCK_K", "OTHER_K"), steps, strict=True))
    rows = batch * image[1] * image[2]
    blocks = -(-rows // tile.BLOCK_M), -(-out_channels // tile.BLOCK_N)
    step = min(blocks[0], max(1, programs // blocks[1]))
    return values | {
        "ROWS": rows,
        "BLOCKS_M": blocks[0],
        "BLOCKS_N": blocks[1],
        "STEP": step,
        "PROGRAMS": step * blocks[1],
        "BLOCK_K": weight_stationary.depth(image[0]),
        "OTHER_K": weight_stationary.depth(source[0]),
    }
