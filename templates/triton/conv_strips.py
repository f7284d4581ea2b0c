"""Triton template of a depthwise convolution in strips, which is bound by its multiplications.

A thread has some channels of one place of the image. It holds all of their weights in registers
while it goes along a band of rows, and computes a few rows and columns of the result at a time:
each pixel that these read is loaded and upcast once, for all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ipex_inductor.ops.conv.geometry import sides
from ipex_inductor.templates.conv_geometry import geometry
from ipex_inductor.templates.kernel_text import read_kernel_text

SOURCE = read_kernel_text("triton/conv_strips.py.jinja")


@dataclass(frozen=True)
class Tile:
    """Rows and columns of the result at a time, powers of two; channels of a program, its warps."""

    BLOCK_H: int
    BLOCK_W: int
    BLOCK_N: int
    num_warps: int


# By the instructions of sm_90, 7x7: 82 and 88 for an output with its epilogue, of which 49 are
# products (116 of `conv_depthwise`); 168 and 96 registers. On an H200, of ConvNeXt's last stages at
# batch 64: 38 and 20 us (`conv_depthwise` 49 and 26, cuDNN 63 and 35).
TILES = (
    Tile(4, 4, 64, 1),
    Tile(4, 4, 32, 1),
)
STRIPS = 7  # strips that a program computes with the weights it has loaded, at most


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
    bands, strips = -(-out_height // tile.BLOCK_H), -(-out_width // tile.BLOCK_W)
    parts = -(-strips // STRIPS)
    return {
        "BLOCKS": batch * bands * parts,
        "BANDS": bands,
        "PARTS": parts,
        "STRIPS": STRIPS,
        "ALL": strips,
        "LEVELS": (tile.BLOCK_H * tile.BLOCK_W).bit_length() - 1,
        **geometry(image, window, stride, padding, dilation),
        "BLOCK_M": tile.BLOCK_H * tile.BLOCK_W,
        "BLOCK_H": tile.BLOCK_H,
        "BLOCK_W": tile.BLOCK_W,
        "BLOCK_N": tile.BLOCK_N,
    }
