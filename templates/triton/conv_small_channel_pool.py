"""Triton template of a small-channel convolution with ReLU and a max pool after it, in one kernel.

A program goes down an image, a line of the convolution at a time, by the GEMM of
`templates/triton/conv_small_channel.py`. It keeps the maximum of lines, rounded as a separate
convolution would round it, so for 3 x 3 windows with stride 2 each line is computed once. Of a
window's three columns two are a pair; the third is the first of the next pair, which `tl.gather`
fetches.

K and edges are counted again in each line, from a zero that the compiler cannot see: otherwise it
would keep them all in registers, which would then suffice for three programs a multiprocessor
instead of four.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ipex_inductor.ops.conv.geometry import sides
from ipex_inductor.ops.conv.small_channel_pool import AROUND, STEP, WINDOW
from ipex_inductor.templates.triton import conv_small_channel

# Rendered with Inductor's hooks (`def_kernel`, `store_output`, INDEX_DTYPE), or with the hooks of a
# caller that renders it alone.
SOURCE = """\
{%- macro unknown(name, pad) %}
{%- if PTX %}
{{pad}}{{name}} = tl.multiple_of(tl.inline_asm_elementwise(
{{pad}}    "mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1), 64)
{%- else %}
{{pad}}{{name}} = tl.program_id(0) * 0
{%- endif %}
{%- endmacro %}
{%- macro greatest(a, b) -%}
tl.maximum({{a}}, {{b}}, propagate_nan=tl.PropagateNan.ALL)
{%- endmacro %}
{%- if BIASED %}{{def_kernel("X", "W", "BIAS")}}{% else %}{{def_kernel("X", "W")}}{% endif %}
    first = tl.program_id(0) % GROUPS * BLOCK_H
    side = tl.program_id(0) // GROUPS
    across = side % BLOCKS_W * POOLED
    image = (side // BLOCKS_W).to(INDEX_DTYPE)
    out = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
{%- for step in range(STEPS) %}
    weights{{step}} = tl.load(
        W + (tl.arange(0, BLOCK_K) + {{step * BLOCK_K}})[:, None] * OUT_C + out[None, :],
        mask=(out < OUT_C)[None, :], other=0.0,
    )
{%- endfor %}
    column = tl.arange(0, BLOCK_M) + (across * 2 - 1)
    there = (column >= 0) & (column < OUT_W)
    left = column * STEP - BEFORE
    begin = image * IMAGE + left
    held = tl.zeros([BLOCK_M, BLOCK_N], X.dtype.element_ty)
    last = tl.minimum(first + BLOCK_H, POOL_H) * 2
    for line in tl.range(tl.maximum(first * 2 - 1, 0), last, num_stages=1):
{{- unknown("zero", " " * 8) }}
        down = line + zero
        term = tl.arange(0, BLOCK_K) + zero
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
{%- for step in range(STEPS) %}
{{- unknown("nought", " " * 8) }}
        edge = left + nought
        run = (term + {{step * BLOCK_K}}) // WIDTH
        at = (term + {{step * BLOCK_K}}) % WIDTH
        row = line * STRIDE_H - PADDING_H + run % WINDOW_H
        # Unsigned, so that what is before the image is beyond it.
        inside = ((edge[:, None] + at[None, :]).to(tl.uint32) < IN_W) & there[:, None]
        inside = inside & ((row.to(tl.uint32) < IN_H) & (run < RUNS))[None, :]
        terms = begin[:, None] + (row * LINE + (run // WINDOW_H) * PLANE + at)[None, :]
        given = tl.load(X + terms, mask=inside, other=0.0)
    {%- if SHIFT or WIDTH > LENGTH %}
        # Beside the window are other pixels, and zero times infinity is not zero.
        own = (at >= SHIFT) & (at < SHIFT + LENGTH)
        {%- if PTX %}
        bits = tl.where(own, -1, 0).to(tl.int16)[None, :]
        given = tl.inline_asm_elementwise(
            "and.b32 $0, $1, $2;", "=r,r,r", [given, bits],
            dtype=X.dtype.element_ty, is_pure=True, pack=2,
        )
        {%- else %}
        given = tl.where(own[None, :], given, 0.0)
        {%- endif %}
    {%- endif %}
        acc = tl.dot(given, weights{{step}}, acc, allow_tf32=ALLOW_TF32)
{%- endfor %}
{%- if BIASED %}
        bias = tl.load(BIAS + out, mask=out < OUT_C, other=0.0)
        acc += bias.to(tl.float32)[None, :]
{%- endif %}
        # Nothing is less than what relu leaves, so zeros stand where there is no pixel.
        relu = {{greatest("acc", "0.0")}}.to(X.dtype.element_ty)
        relu = tl.where(there[:, None] & (down < OUT_H), relu, 0.0)
        held = {{greatest("held", "relu")}}.to(X.dtype.element_ty)
        if line % 2 == 1:
            pairs = tl.permute(tl.reshape(held, [BLOCK_M // 2, 2, BLOCK_N]), (0, 2, 1))
            before, middle = tl.split(pairs)
            spot = tl.minimum(tl.arange(0, BLOCK_M // 2) + 1, BLOCK_M // 2 - 1)
            spot = tl.broadcast_to(spot[:, None], [BLOCK_M // 2, BLOCK_N])
            behind = tl.gather(before, spot, 0)
            best = {{greatest("before", "middle")}}
            best = {{greatest("best", "behind")}}.to(tl.float32)
            pooled = tl.arange(0, BLOCK_M // 2)
            whole = pooled * 0 + down // 2 >= first  # the line before them is of others
            mask = (pooled < POOLED) & (pooled + across < POOL_W) & whole
            mask = mask[:, None] & (out < OUT_C)[None, :]
            idx_m = ((image * POOL_H + line // 2) * POOL_W + across + pooled)[:, None]
            idx_n = out[None, :]
{%- set shape = ("BLOCK_M // 2", "BLOCK_N") %}
            {{store_output(("idx_m", "idx_n"), "best", "mask", val_shape=shape, indent_width=12)}}
            held = relu
"""


@dataclass(frozen=True)
class Tile:
    """Columns of the convolution, channels and K of a step, lines of the result, and warps."""

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    BLOCK_H: int
    num_warps: int = 4


# A line is fastest with 64 columns, K = 32 and 4 warps: with 128 columns, 8 warps or K = 16 an H200
# took a tenth more and up to twice as long.
TILES = tuple(Tile(64, wide, 32, lines) for wide in (32, 64) for lines in (16, 8, 4, 2))
NARROWEST, WIDEST = 32, 64  # channels of a block


def fits(tile: Tile, out_channels: int, terms: int) -> bool:
    """Return whether `tile` is as wide as the channels, and few of its steps cover a kernel."""
    width = min(WIDEST, max(NARROWEST, 1 << (out_channels - 1).bit_length()))
    return width == tile.BLOCK_N and terms // tile.BLOCK_K <= conv_small_channel.MOST_STEPS


def pooled_size(size: Sequence[int]) -> tuple[int, int]:
    """Return the height and width of the pool's result for a convolution's height and width."""
    return sides(size, (WINDOW,) * 2, (STEP,) * 2, (AROUND,) * 2)


def constants(
    batch: int,
    image: Sequence[int],
    out_channels: int,
    window: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    last: bool,
    tile: Tile,
    biased: bool,
    ptx: bool,
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
        tile: the block sizes.
        biased: whether there is a bias.
        ptx: whether inline assembly of NVIDIA GPUs may be used.
    """
    conv_tile = conv_small_channel.Tile(tile.BLOCK_M, tile.BLOCK_N, tile.BLOCK_K)
    options = window, stride, padding, last, conv_tile
    conv_constants = conv_small_channel.constants(batch, image, out_channels, *options)
    height, width = pooled_size((conv_constants["OUT_H"], conv_constants["OUT_W"]))
    # A column more than the pairs is read on the left, before the first pair.
    blocks = -(-width // ((tile.BLOCK_M - 1) // 2))
    groups = -(-height // tile.BLOCK_H)
    return {
        **conv_constants,
        "POOL_H": height,
        "POOL_W": width,
        "POOLED": -(-width // blocks),
        "BLOCKS_W": blocks,
        "GROUPS": groups,
        "BLOCKS": batch * blocks * groups,
        "BIASED": biased,
        "PTX": ptx,
        "BLOCK_H": tile.BLOCK_H,
    }
