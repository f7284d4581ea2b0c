"""Triton templates of two added GEMMs: a 1x1 convolution and that of its residual shortcut.

Unfused, the shortcut's result is written and read again, which is most of the memory traffic of
both. In `STREAMED` both weights stay in shared memory, as in `weight_stationary.py`; in `BOXES`, by
TMA tiles, they do not have to fit, as in `conv_tma.py`.
"""

from collections.abc import Sequence
from typing import Any

from ipex_inductor.templates.triton import conv_tma, weight_stationary

# Rendered with Inductor's hooks, or with the hooks of a caller that renders it alone.
STREAMED = """\
{{def_kernel("X", "W", "S", "P", "BIAS")}}
    first = tl.program_id(0)
    column = first % BLOCKS_N * BLOCK_N + tl.arange(0, BLOCK_N)
    term = tl.arange(0, BLOCK_K)
    other_term = tl.arange(0, OTHER_K)
{%- set outer = "(column < OUT_C)[None, :]" if OUT_C % BLOCK_N else "" %}
{%- set inner = "(term < TERMS)" if TERMS % BLOCK_K else "" %}
{%- set other_inner = "(other_term < OTHER_TERMS)" if OTHER_TERMS % OTHER_K else "" %}
{%- set both = [outer, inner ~ "[:, None]" if inner] | select | join(" & ") %}
{%- set other_both = [outer, other_inner ~ "[:, None]" if other_inner] | select | join(" & ") %}
{%- set rest = ", other=0.0" %}
    weights = tl.load(
        W + column[None, :] * TERMS + term[:, None]{{", mask=" ~ both ~ rest if both}}
    )
    projection = tl.load(
        P + column[None, :] * OTHER_TERMS + other_term[:, None]
        {{-", mask=" ~ other_both ~ rest if other_both}}
    )
    bias = tl.load(BIAS + column{{", mask=column < OUT_C" ~ rest if outer}}).to(tl.float32)
    for block in tl.range(first // BLOCKS_N, BLOCKS_M, STEP, num_stages=STAGES):
        row = tl.arange(0, BLOCK_M).to(INDEX_DTYPE) + block * BLOCK_M
        there = (row < ROWS)[:, None]
{%- if STRIDE_H * STRIDE_W > 1 %}
        line = row // (OUT_H * OUT_W) * IN_H + row // OUT_W % OUT_H * STRIDE_H
        pixel = line * IN_W + row % OUT_W * STRIDE_W
{%- else %}
        pixel = row
{%- endif %}
        given = tl.load(
            X + row[:, None] * TERMS + term[None, :],
            mask=there{{" & " ~ inner ~ "[None, :]" if inner}}, other=0.0,
        )
        beside = tl.load(
            S + pixel[:, None] * OTHER_TERMS + other_term[None, :],
            mask=there{{" & " ~ other_inner ~ "[None, :]" if other_inner}}, other=0.0,
        )
        acc = tl.dot(given, weights, allow_tf32=ALLOW_TF32)
        acc = tl.dot(beside, projection, acc, allow_tf32=ALLOW_TF32) + bias[None, :]
        idx_m = row[:, None]
        idx_n = column[None, :]
        mask = there{{" & " ~ outer if outer}}
{%- set shape = ("BLOCK_M", "BLOCK_N") %}
        {{store_output(("idx_m", "idx_n"), "acc", "mask", val_shape=shape, indent_width=8)}}
"""

# Each sum has a pipeline of its own: a load that depends on whose turn it is would have none.
BOXES = """\
{{def_kernel("X", "W", "S", "P", "BIAS")}}
    image = tl.make_tensor_descriptor(
        X,
        [BATCH, OUT_H, OUT_W, TERMS],
        [OUT_H * OUT_W * TERMS, OUT_W * TERMS, TERMS, 1],
        [BOX_N, BOX_H, BOX_W, BLOCK_K],
    )
    # The columns of one stride lie side by side, and so do the lines.
    source = tl.make_tensor_descriptor(
        S,
        [BATCH, OUT_H, STRIDE_H, OUT_W, STRIDE_W * OTHER_TERMS],
        [IN_H * IN_W * OTHER_TERMS, STRIDE_H * IN_W * OTHER_TERMS, IN_W * OTHER_TERMS,
         STRIDE_W * OTHER_TERMS, 1],
        [BOX_N, BOX_H, 1, BOX_W, OTHER_K],
    )
    weights = tl.make_tensor_descriptor(W, [OUT_C, TERMS], [TERMS, 1], [BLOCK_N, BLOCK_K])
    projection = tl.make_tensor_descriptor(
        P, [OUT_C, OTHER_TERMS], [OTHER_TERMS, 1], [BLOCK_N, OTHER_K]
    )
    for block in tl.range(tl.program_id(0), BLOCKS, PROGRAMS):
        first = block % BLOCKS_N * BLOCK_N
        box = block // BLOCKS_N
        left = box % BOXES_W * BOX_W
        top = box // BOXES_W % BOXES_H * BOX_H
        begin = box // BOXES_W // BOXES_H * BOX_N
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for k in tl.range(0, TERMS, BLOCK_K, num_stages=STAGES):
            given = image.load([begin, top, left, k]).reshape(BLOCK_M, BLOCK_K).T
            acc = tl.dot(weights.load([first, k]), given, acc, allow_tf32=ALLOW_TF32)
        for k in tl.range(0, OTHER_TERMS, OTHER_K, num_stages=STAGES):
            beside = source.load([begin, top, 0, left, k]).reshape(BLOCK_M, OTHER_K).T
            acc = tl.dot(projection.load([first, k]), beside, acc, allow_tf32=ALLOW_TF32)
        at = tl.arange(0, BLOCK_M)
        number = begin + at // (BOX_H * BOX_W)
        high = top + at // BOX_W % BOX_H
        wide = left + at % BOX_W
        out = first + tl.arange(0, BLOCK_N)
        bias = tl.load(BIAS + out, mask=out < OUT_C, other=0.0).to(tl.float32)
        made = acc.T + bias[None, :]
        idx_m = ((number.to(INDEX_DTYPE) * OUT_H + high) * OUT_W + wide)[:, None]
        idx_n = out[None, :]
        inside = (number < BATCH) & (high < OUT_H) & (wide < OUT_W)
        mask = inside[:, None] & (out < OUT_C)[None, :]
{%- set shape = ("BLOCK_M", "BLOCK_N") %}
        {{store_output(("idx_m", "idx_n"), "made", "mask", val_shape=shape, indent_width=8)}}
"""

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
