"""Triton for the backward of a max pool: each pixel asks the few windows that it is in.

Which place of a window a pixel is, is one number for a row of channels, so an element costs a load,
a comparison and a sum for each window. Inductor's own kernel computes indices for each element by
itself, and takes ten times as long as memory does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# To Inductor's hooks, or those of who renders it alone.
SOURCE = """\
{{def_kernel("GRAD", "OFFSETS")}}
    pixel = tl.program_id(0).to(INDEX_DTYPE) * BLOCK_M + tl.arange(0, BLOCK_M)
    channel = tl.program_id(1).to(INDEX_DTYPE) * BLOCK_N + tl.arange(0, BLOCK_N)
    line = pixel // IN_W
    image = line // IN_H
    y = line % IN_H + PADDING_H
    x = pixel % IN_W + PADDING_W
    known = (channel < CHANNELS)[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
{%- for i in range(WINDOWS_H) | reverse %}
    row = y // STRIDE_H - {{i}}
    down = y % STRIDE_H + {{i * STRIDE_H}}
    {%- for j in range(WINDOWS_W) | reverse %}
    column = x // STRIDE_W - {{j}}
    along = x % STRIDE_W + {{j * STRIDE_W}}
    there = (down < WINDOW_H) & (along < WINDOW_W) & (pixel < PIXELS)
    there = there & (row >= 0) & (row < OUT_H) & (column >= 0) & (column < OUT_W)
    begin = ((image * OUT_H + row) * OUT_W + column) * CHANNELS
    place = begin[:, None] + channel[None, :]
    came = tl.load(OFFSETS + place, mask=there[:, None] & known, other=-1)
    given = tl.load(GRAD + place, mask=there[:, None] & known, other=0.0)
    own = (down * WINDOW_W + along)[:, None]
    acc += tl.where(came.to(tl.int32) == own, given.to(tl.float32), 0.0)
    {%- endfor %}
{%- endfor %}
    idx_m = pixel[:, None]
    idx_n = channel[None, :]
    mask = (pixel < PIXELS)[:, None] & known
    {{store_output(("idx_m", "idx_n"), "acc", "mask", val_shape=("BLOCK_M", "BLOCK_N"))}}
"""


@dataclass(frozen=True)
class Tile:
    """Pixels and channels that a program makes; its warps."""

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int


TILES = (Tile(32, 64, 4), Tile(64, 32, 4), Tile(128, 16, 4))


def tile_for(channels: int) -> Tile:
    """The widest that is filled."""
    return next((tile for tile in TILES if channels >= tile.BLOCK_N), TILES[-1])


def windows(window: Sequence[int], stride: Sequence[int]) -> tuple[int, int]:
    """How many windows a pixel may be in, in both directions."""
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
    """What the template is rendered with; `image` is [C, H, W], `pooled` [H', W']."""
    channels, *size = image
    each = {
        "IN": size,
        "OUT": pooled,
        "WINDOW": window,
        "WINDOWS": windows(window, stride),
        "STRIDE": stride,
        "PADDING": padding,
    }
    sized = {
        f"{n}_{side}": v for n, both in each.items() for side, v in zip("HW", both, strict=True)
    }
    return {
        "PIXELS": batch * size[0] * size[1],
        "CHANNELS": channels,
        **sized,
        "BLOCK_M": tile.BLOCK_M,
        "BLOCK_N": tile.BLOCK_N,
    }
