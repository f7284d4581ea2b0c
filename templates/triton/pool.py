"""Triton templates of a max pool in training: after a batch norm and ReLU, and its backward.

Offsets are taps of the pool's window, so they are constants of the kernel, and an element costs a
load, a comparison and a selection for each tap. Inductor's own backward computes indices of the
image for each element, and takes ten times as long as memory does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# Rendered with Inductor's hooks, or with the hooks of a caller that renders it alone.
# OFFSETS is written.
FORWARD = """\
{{def_kernel("X", "MEAN", "RSTD", "WEIGHT", "BIAS", "OFFSETS")}}
    pixel = tl.program_id(0).to(INDEX_DTYPE) * BLOCK_M + tl.arange(0, BLOCK_M)
    channel = tl.program_id(1).to(INDEX_DTYPE) * BLOCK_N + tl.arange(0, BLOCK_N)
    line = pixel // OUT_W
    image = line // OUT_H
    top = line % OUT_H * STRIDE_H - PADDING_H
    left = pixel % OUT_W * STRIDE_W - PADDING_W
    known = channel < CHANNELS
    mean = tl.load(MEAN + channel, mask=known, other=0.0)[None, :]
    rstd = tl.load(RSTD + channel, mask=known, other=0.0)[None, :]
    weight = tl.load(WEIGHT + channel, mask=known, other=0.0)[None, :]
    bias = tl.load(BIAS + channel, mask=known, other=0.0)[None, :]
    best = tl.full([BLOCK_M, BLOCK_N], float("-inf"), tl.float32)
    place = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
{%- for i in range(WINDOW_H) %}
    {%- for j in range(WINDOW_W) %}
    y = top + {{i}}
    x = left + {{j}}
    inside = (pixel < PIXELS) & (y >= 0) & (y < IN_H) & (x >= 0) & (x < IN_W)
    begin = ((image * IN_H + y) * IN_W + x) * CHANNELS
    given = tl.load(
        X + (begin[:, None] + channel[None, :]), mask=inside[:, None] & known[None, :], other=0.0
    )
    made = (given.to(tl.float32) - mean) * rstd * weight + bias
    made = made.to(X.dtype.element_ty).to(tl.float32)
    made = tl.where(made < 0.0, 0.0, made)  # which keeps NaN
    made = tl.where(inside[:, None], made, float("-inf"))
    # The first of the largest, or of those that are no number.
    taken = (made > best) | ((made != made) & (best == best))
    best = tl.where(taken, made, best)
    place = tl.where(taken, {{i * WINDOW_W + j}}, place)
    {%- endfor %}
{%- endfor %}
    idx_m = pixel[:, None]
    idx_n = channel[None, :]
    mask = (pixel < PIXELS)[:, None] & known[None, :]
    tl.store(OFFSETS + (idx_m * CHANNELS + idx_n), place.to(tl.int8), mask=mask)
    {{store_output(("idx_m", "idx_n"), "best", "mask", val_shape=("BLOCK_M", "BLOCK_N"))}}
"""

# The pixels of a step of the window, in both directions, are in equal windows.
BACKWARD = """\
{{def_kernel("GRAD", "OFFSETS")}}
    step = tl.program_id(0).to(INDEX_DTYPE) * BLOCK_M + tl.arange(0, BLOCK_M)
    channel = tl.program_id(1).to(INDEX_DTYPE) * BLOCK_N + tl.arange(0, BLOCK_N)
    line = step // STEPS_W
    image = line // STEPS_H
    y = line % STEPS_H
    x = step % STEPS_W
    known = (channel < CHANNELS)[None, :]
{%- for r in range(STRIDE_H) %}
    {%- for s in range(STRIDE_W) %}
    acc{{r}}_{{s}} = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    {%- endfor %}
{%- endfor %}
{%- for i in range(WINDOWS_H) | reverse %}
    {%- for j in range(WINDOWS_W) | reverse %}
    row = y - {{i}}
    column = x - {{j}}
    there = (step < STEPS) & (row >= 0) & (row < OUT_H) & (column >= 0) & (column < OUT_W)
    begin = ((image * OUT_H + row) * OUT_W + column) * CHANNELS
    place = begin[:, None] + channel[None, :]
    came = tl.load(OFFSETS + place, mask=there[:, None] & known, other=-1)
    given = tl.load(GRAD + place, mask=there[:, None] & known, other=0.0).to(tl.float32)
        {%- for r in range(STRIDE_H) %}
            {%- for s in range(STRIDE_W) %}
                {%- set down, along = r + i * STRIDE_H, s + j * STRIDE_W %}
                {%- if down < WINDOW_H and along < WINDOW_W %}
    acc{{r}}_{{s}} += tl.where(came == {{down * WINDOW_W + along}}, given, 0.0)
                {%- endif %}
            {%- endfor %}
        {%- endfor %}
    {%- endfor %}
{%- endfor %}
    idx_n = channel[None, :]
{%- for r in range(STRIDE_H) %}
    {%- for s in range(STRIDE_W) %}
    down = y * STRIDE_H + {{r}} - PADDING_H
    along = x * STRIDE_W + {{s}} - PADDING_W
    idx_m = ((image * IN_H + down) * IN_W + along)[:, None]
    inside = (step < STEPS) & (down >= 0) & (down < IN_H) & (along >= 0) & (along < IN_W)
    mask = inside[:, None] & known
    {{store_output(
        ("idx_m", "idx_n"), "acc%d_%d" | format(r, s), "mask", val_shape=("BLOCK_M", "BLOCK_N")
    )}}
    {%- endfor %}
{%- endfor %}
"""


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
