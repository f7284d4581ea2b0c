"""Triton templates of a max pool in training: after a batch norm and ReLU, and its backward.

Offsets are taps of the pool's window, so they are constants of the kernel, and an element costs a
load, a comparison and a selection for each tap. Inductor's own backward computes indices of the
image for each element, and takes ten times as long as memory does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ipex_inductor.templates.kernel_text import read_kernel_text

# OFFSETS is written.
FORWARD = read_kernel_text("triton/pool_forward.py.jinja")

# The pixels of a step of the window, in both directions, are in equal windows.
BACKWARD = read_kernel_text("triton/pool_backward.py.jinja")


@dataclass(frozen=True)
class Tile:
    """Pixels of the result, or steps of the window, and channels of a program; its warps."""

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int


TILES = (Tile(16, 64, 4), Tile(32, 32, 4), Tile(64, 16, 4))


def tile_for(channels: int) -> Tile:
    """Return the widest tile that the channels fill."""
    return next((tile for tile in TILES if channels >= tile.BLOCK_N), TILES[-1])


def windows(window: Sequence[int], stride: Sequence[int]) -> tuple[int, int]:
    """Return how many windows a pixel may be in, in both directions."""
    down, along = (-(-size // step) for size, step in zip(window, stride, strict=True))
    return down, along


def constants(
    batch: int,
    image: Sequence[int],
    pooled: Sequence[int],
    window: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    tile: Tile,
) -> dict[str, Any]:
    """Return the constants that both templates are rendered with.

    Args:
        batch: the number of images.
        image: [C, H, W] of the input.
        pooled: [H', W'] of the result.
        window: [h, w] of the pool.
        stride: of the pool.
        padding: of the input.
        tile: the block sizes.
    """
    channels, *size = image
    steps = [-(-(n + pad) // by) for n, pad, by in zip(size, padding, stride, strict=True)]
    pairs = {
        "IN": size,
        "OUT": pooled,
        "WINDOW": window,
        "WINDOWS": windows(window, stride),
        "STRIDE": stride,
        "STEPS": steps,
        "PADDING": padding,
    }
    sized = {
        f"{n}_{side}": v for n, both in pairs.items() for side, v in zip("HW", both, strict=True)
    }
    return {
        "PIXELS": batch * pooled[0] * pooled[1],
        "STEPS": batch * steps[0] * steps[1],
        "CHANNELS": channels,
        **sized,
        "BLOCK_M": tile.BLOCK_M,
        "BLOCK_N": tile.BLOCK_N,
    }
