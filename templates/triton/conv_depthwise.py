"""Triton template of a depthwise convolution, which is bound by memory and by loads.

A program computes some rows of some columns of an image, for adjacent channels. For a column of the
kernel it holds the weights of all rows; each row of the image is loaded once for that column, and
added to all rows of the result that it takes part in.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ipex_inductor.ops.conv.geometry import sides
from ipex_inductor.templates.triton.geometry import geometry

# Rendered with Inductor's hooks, or with the hooks of a caller that renders it alone.
SOURCE = """\
{{def_kernel("X", "W")}}
    block = tl.program_id(0).to(INDEX_DTYPE)
    channel = tl.program_id(1).to(INDEX_DTYPE) * BLOCK_N + tl.arange(0, BLOCK_N)
    image = block // (BLOCKS_H * BLOCKS_W)
    first = (block // BLOCKS_W) % BLOCKS_H * BLOCK_H
    column = (block % BLOCKS_W) * BLOCK_W + tl.arange(0, BLOCK_W)
    top = tl.zeros([1, 1], INDEX_DTYPE) + (first * STRIDE_H - PADDING_H)
    left = column * STRIDE_W - PADDING_W
    begin = X + image * (IN_H * IN_W * CHANNELS) + channel[None, :]
    known = (channel < CHANNELS)[None, :]
    # Weights are read by each column anew, so that no thread has to ask others for them.
    alike = (tl.arange(0, BLOCK_W) >= 0)[:, None]
    factors = W + channel[None, :] + tl.zeros([BLOCK_W, 1], INDEX_DTYPE)
{%- for line in range(BLOCK_H) %}
    acc_{{line}} = tl.zeros([BLOCK_W, BLOCK_N], tl.float32)
{%- endfor %}
{%- for j in range(WINDOW_W) %}
    {%- for i in range(WINDOW_H) %}
    tap_{{i}} = tl.load(
        factors + {{i * WINDOW_W + j}} * CHANNELS, mask=known & alike, other=0.0
    ).to(tl.float32)
    {%- endfor %}
    x = left + {{j * DILATION_W}}
    inside = ((x >= 0) & (x < IN_W))[:, None] & known
    from_ = begin + (x * CHANNELS)[:, None]
    {%- for row in range((BLOCK_H - 1) * STRIDE_H + (WINDOW_H - 1) * DILATION_H + 1) %}
        {%- set found = namespace(yet=false) %}
        {%- for line in range(BLOCK_H) %}
            {%- set i = (row - line * STRIDE_H) // DILATION_H %}
            {%- if i >= 0 and i < WINDOW_H and line * STRIDE_H + i * DILATION_H == row %}
                {%- if not found.yet %}
    y = top + {{row}}
    given = tl.load(
        from_ + y * (IN_W * CHANNELS), mask=inside & (y >= 0) & (y < IN_H), other=0.0
    ).to(tl.float32)
                    {%- set found.yet = true %}
                {%- endif %}
    acc_{{line}} += given * tap_{{i}}
            {%- endif %}
        {%- endfor %}
    {%- endfor %}
{%- endfor %}
{%- if BLOCK_H == 2 %}
    acc = tl.join(acc_0, acc_1).permute(2, 0, 1).reshape(2 * BLOCK_W, BLOCK_N)
{%- else %}
    acc = tl.join(tl.join(acc_0, acc_1), tl.join(acc_2, acc_3))
    acc = acc.permute(3, 2, 0, 1).reshape(4 * BLOCK_W, BLOCK_N)
{%- endif %}
    place = tl.arange(0, BLOCK_M)
    row = first + place // BLOCK_W
    column = (block % BLOCKS_W) * BLOCK_W + place % BLOCK_W
    idx_m = ((image * OUT_H + row) * OUT_W + column)[:, None]
    idx_n = channel[None, :]
    mask = ((row < OUT_H) & (column < OUT_W))[:, None] & known
    {{store_output(("idx_m", "idx_n"), "acc", "mask", val_shape=("BLOCK_M", "BLOCK_N"))}}
"""


@dataclass(frozen=True)
class Tile:
    """Rows (2 or 4), columns and channels that a program computes, and its warps."""

    BLOCK_H: int
    BLOCK_W: int
    BLOCK_N: int
    num_warps: int


# By the instructions of sm_90: 96 to 176 registers, no shared memory.
TILES = (
    Tile(4, 8, 64, 2),
    Tile(4, 16, 64, 4),
    Tile(4, 8, 32, 1),
)
# For Intel's GPUs, with 16 or 32 lanes a warp: more warps, so that nothing spills
# (`benchmarks/studies/triton_xe.py`). None was timed.
XE_TILES = (
    Tile(4, 8, 64, 8),
    Tile(4, 4, 64, 8),
    Tile(2, 8, 64, 8),
    Tile(2, 4, 32, 4),
)
MOST_TAPS = 49  # taps that are unrolled


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
    blocks = -(-out_height // tile.BLOCK_H), -(-out_width // tile.BLOCK_W)
    return {
        "BLOCKS": batch * blocks[0] * blocks[1],
        "BLOCKS_H": blocks[0],
        "BLOCKS_W": blocks[1],
        **geometry(image, window, stride, padding, dilation),
        "BLOCK_M": tile.BLOCK_H * tile.BLOCK_W,
        "BLOCK_H": tile.BLOCK_H,
        "BLOCK_W": tile.BLOCK_W,
        "BLOCK_N": tile.BLOCK_N,
    }
