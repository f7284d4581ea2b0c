"""Triton template of a small-channel convolution's weight gradient.

The input is gathered as by `templates/triton/conv_small_channel.py`. A program goes through a part
of the pixels and keeps the sums of all of K, or of as many as fit into registers, so that the
gradient, by far the largest, is read once. It is the left factor, transposed: Hopper's tensor cores
read both from shared memory as they are, and K needs multiples of BLOCK_K only, as each accumulator
has so many.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ipex_inductor.ops.conv.small_channel import Runs, runs
from ipex_inductor.templates.kernel_text import read_kernel_text
from ipex_inductor.templates.triton.conv_small_channel import (
    NARROWEST,
    WIDEST,
    make_gather_constants,
)

NAME = "ipex.triton.stem_weight"

# Elements beside a kernel are loaded and multiplied too: their sums are cut off.
SOURCE = read_kernel_text("triton/conv_small_channel_weight.py.jinja")


@dataclass(frozen=True)
class Tile:
    """Pixels of a step, channels, accumulator columns; most programs of a multiprocessor."""

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    num_warps: int
    num_stages: int
    programs: int

    def shared(self, terms: int, itemsize: int) -> int:
        """Return the bytes of shared memory: the stages of both factors."""
        columns = self.BLOCK_N + self.parts(terms)[1] * self.BLOCK_K
        return itemsize * self.num_stages * self.BLOCK_M * columns

    def fitting(self, room: int, terms: int, itemsize: int) -> int:
        """Return how many programs a multiprocessor with `room` bytes of shared memory holds."""
        return min(self.programs, room // self.shared(terms, itemsize))

    def parts(self, terms: int) -> tuple[int, int]:
        """Return how many programs share K, and how many accumulators each has."""
        all_of_them = -(-terms // self.BLOCK_K)
        most = min(MOST, max(1, SUMS * self.num_warps // (self.BLOCK_N * self.BLOCK_K)))
        shared = -(-all_of_them // most)
        return shared, -(-all_of_them // shared)


SUMS = 4096  # sums that a warp keeps, 128 a thread
MOST = 8  # accumulators, which are unrolled
FEW = 32  # elements of K, for which any tile will do
TILES = (
    Tile(32, 16, 32, 4, 4, 4),
    Tile(128, 16, 32, 4, 3, 3),
    Tile(32, 32, 32, 4, 4, 4),
    Tile(128, 32, 32, 4, 3, 3),
    Tile(32, 64, 32, 4, 4, 3),
    Tile(64, 64, 32, 4, 3, 2),
    Tile(128, 64, 32, 4, 3, 1),
    Tile(64, 64, 64, 4, 3, 2),
    Tile(64, 128, 16, 4, 3, 2),
    Tile(64, 128, 64, 4, 3, 2),
)


def fits(tile: Tile, out_channels: int, found: Runs) -> bool:
    """Return whether `tile` is as wide as the channels, and its accumulators are mostly used."""
    width = min(WIDEST, max(NARROWEST, 1 << (out_channels - 1).bit_length()))
    return width == tile.BLOCK_N and (tile.BLOCK_K <= FEW or 2 * terms_of(found) > tile.BLOCK_K)


def terms_of(found: Runs) -> int:
    """Return the elements of K that a pixel has, including elements beside the kernel."""
    return found.count * found.width


def division(pixels: int, out_channels: int, terms: int, tile: Tile, programs: int) -> int:
    """Return the steps of a program, if `programs` fit on the device at once.

    Args:
        pixels: of the result.
        out_channels: the channels of the result.
        terms: K.
        tile: the block sizes.
        programs: how many fit on the device at once.
    """
    blocks = -(-out_channels // tile.BLOCK_N) * tile.parts(terms)[0]
    return -(-pixels // (tile.BLOCK_M * max(1, programs // blocks)))


def constants(
    batch: int,
    image: Sequence[int],
    out_channels: int,
    window: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    last: bool,
    steps: int,
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
        last: whether the input is channels-last.
        steps: of a program.
        tile: the block sizes.
    """
    options = window, stride, padding, last
    gather_constants = make_gather_constants(batch, image, *options)
    shared, parts = tile.parts(terms_of(runs(image, *options)))
    blocks = -(-out_channels // tile.BLOCK_N)
    return {
        **gather_constants,
        "OUT_C": out_channels,
        "TERMS": shared * parts * tile.BLOCK_K,
        "STEPS": steps,
        "STAGES": tile.num_stages,
        "PARTS": parts,
        "PROGRAMS": -(-gather_constants["PIXELS"] // (steps * tile.BLOCK_M)),
        "BLOCKS": blocks * shared,
        "BLOCKS_N": blocks,
        "BLOCK_M": tile.BLOCK_M,
        "BLOCK_N": tile.BLOCK_N,
        "BLOCK_K": tile.BLOCK_K,
    }
