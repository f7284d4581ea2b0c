"""Triton template of a depthwise convolution in strips, which is bound by its multiplications.

A thread has some channels of one place of the image. It holds all of their weights in registers
while it goes along a band of rows, and computes a few rows and columns of the result at a time:
each pixel that these read is loaded and upcast once, for all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ipex_inductor.ops.conv.geometry import sides
from ipex_inductor.templates.triton.geometry import geometry

# Rendered with Inductor's hooks, or with the hooks of a caller that renders it alone.
SOURCE = """\
{{def_kernel("X", "W")}}
{%- set whole = CHANNELS % BLOCK_N == 0 %}
    block = tl.program_id(0).to(INDEX_DTYPE)
    channel = tl.program_id(1).to(INDEX_DTYPE) * BLOCK_N + tl.arange(0, BLOCK_N)
    known = channel < CHANNELS
{%- for tap in range(WINDOW_H * WINDOW_W) %}
    tap_{{tap}} = tl.load(
        W + {{tap}} * CHANNELS + channel{{"" if whole else ", mask=known, other=0.0"}}
    ).to(tl.float32)
{%- endfor %}
    part = (block % PARTS).to(tl.int32)
    band = block // PARTS
    first = band % BANDS * BLOCK_H
    image = band // BANDS
    top = tl.zeros([1], INDEX_DTYPE) + (first * STRIDE_H - PADDING_H)
    for number in tl.range(0, tl.minimum(STRIPS, ALL - part * STRIPS), num_stages=1):
        strip = part * STRIPS + number
        left = tl.zeros([1], tl.int32) + (strip * (BLOCK_W * STRIDE_W) - PADDING_W)
        begin = X + ((image * IN_H + top) * IN_W + left) * CHANNELS + channel
{%- for at in range(BLOCK_M) %}
        acc_{{at}} = tl.zeros([BLOCK_N], tl.float32)
{%- endfor %}
{#- Of a row or column of the image: which of the block, by which of the window's. -#}
{%- macro parts(at, count, stride, dilation, window, into) %}
    {%- for made in range(count) %}
        {%- set tap = (at - made * stride) // dilation %}
        {%- if tap >= 0 and tap < window and made * stride + tap * dilation == at %}
            {%- set _ = into.append((made, tap)) %}
        {%- endif %}
    {%- endfor %}
{%- endmacro %}
{%- for y in range((BLOCK_H - 1) * STRIDE_H + (WINDOW_H - 1) * DILATION_H + 1) %}
    {%- set rows = [] %}
    {{- parts(y, BLOCK_H, STRIDE_H, DILATION_H, WINDOW_H, rows) }}
    {%- for x in range((BLOCK_W - 1) * STRIDE_W + (WINDOW_W - 1) * DILATION_W + 1) if rows %}
        {%- set columns = [] %}
        {{- parts(x, BLOCK_W, STRIDE_W, DILATION_W, WINDOW_W, columns) }}
        {%- if columns %}
        inside = (top + {{y}} >= 0) & (top + {{y}} < IN_H)
        inside &= (left + {{x}} >= 0) & (left + {{x}} < IN_W)
        given = tl.load(
            begin + ({{y}} * IN_W + {{x}}) * CHANNELS,
            mask=inside{{"" if whole else " & known"}}, other=0.0,
        ).to(tl.float32)
        {%- endif %}
        {%- for row, i in rows %}
            {%- for column, j in columns %}
        acc_{{row * BLOCK_W + column}} += given * tap_{{i * WINDOW_W + j}}
            {%- endfor %}
        {%- endfor %}
    {%- endfor %}
{%- endfor %}
{%- for level in range(LEVELS) %}
    {%- for n in range(2 ** (LEVELS - 1 - level)) %}
        acc_{{n}} = tl.join(acc_{{2 * n}}, acc_{{2 * n + 1}})
    {%- endfor %}
{%- endfor %}
        acc = acc_0.permute({{range(LEVELS, -1, -1) | join(", ")}}).reshape(BLOCK_M, BLOCK_N)
        place = tl.arange(0, BLOCK_M)
        row = first + place // BLOCK_W
        column = strip * BLOCK_W + place % BLOCK_W
        idx_m = ((image * OUT_H + row) * OUT_W + column)[:, None]
        idx_n = channel[None, :]
        mask = ((row < OUT_H) & (column < OUT_W))[:, None] & known[None, :]
{%- set shape = ("BLOCK_M", "BLOCK_N") %}
        {{store_output(("idx_m", "idx_n"), "acc", "mask", val_shape=shape, indent_width=8)}}
"""


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
