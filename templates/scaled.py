"""Triton for a convolution of one pixel of an image whose channels are scaled, image by image.

Apart, all of the scaled image is written and read again, where the product moves little else. What
is loaded is multiplied on its way to the tensor cores, which take it from registers. A block of no
more rows than an image has pixels is of at most two images.
"""

from dataclasses import dataclass
from typing import Any

NAME = "ipex.triton.scaled"

# To Inductor's hooks, or those of who renders it alone.
SOURCE = """\
{%- if BIASED %}{{def_kernel("X", "S", "W", "BIAS")}}
{%- else %}{{def_kernel("X", "S", "W")}}{% endif %}
    block = tl.program_id(0)
    first = block // BLOCKS_N * BLOCK_M
    row = tl.arange(0, BLOCK_M).to(INDEX_DTYPE) + first
    column = block % BLOCKS_N * BLOCK_N + tl.arange(0, BLOCK_N)
    there = (row < ROWS)[:, None]
{%- set rest = ", other=0.0" %}
{%- set outer = "(column < COLUMNS)[None, :]" if COLUMNS % BLOCK_N else "" %}
{%- set inner = "(term < TERMS)" if TERMS % BLOCK_K else "" %}
{%- set both = [outer, inner ~ "[:, None]" if inner] | select | join(" & ") %}
{%- if PIXELS >= BLOCK_M %}
    image = first // PIXELS
    own = (row < (image + 1) * PIXELS)[:, None]
    beside = tl.minimum(image + 1, (ROWS - 1) // PIXELS)
{%- else %}
    image = tl.minimum(row, ROWS - 1) // PIXELS
{%- endif %}
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in tl.range(0, TERMS, BLOCK_K, num_stages=STAGES):
        term = k + tl.arange(0, BLOCK_K)
        given = tl.load(
            X + row[:, None] * TERMS + term[None, :],
            mask=there{{" & " ~ inner ~ "[None, :]" if inner}}, other=0.0,
        )
{%- if PIXELS >= BLOCK_M %}
        scale = tl.where(
            own,
            tl.load(S + image * TERMS + term{{", mask=" ~ inner ~ rest if inner}})[None, :],
            tl.load(S + beside * TERMS + term{{", mask=" ~ inner ~ rest if inner}})[None, :],
        )
{%- else %}
        scale = tl.load(
            S + image[:, None] * TERMS + term[None, :]
            {{-", mask=" ~ inner ~ "[None, :]" ~ rest if inner}}
        )
{%- endif %}
        weights = tl.load(
            W + column[None, :] * TERMS + term[:, None]{{", mask=" ~ both ~ rest if both}}
        )
        scaled = (given.to(tl.float32) * scale.to(tl.float32)).to(given.dtype)
        acc = tl.dot(scaled, weights, acc, allow_tf32=ALLOW_TF32)
{%- if BIASED %}
    acc += tl.load(
        BIAS + column{{", mask=column < COLUMNS" ~ rest if outer}}
    ).to(tl.float32)[None, :]
{%- endif %}
    idx_m = row[:, None]
    idx_n = column[None, :]
    mask = there{{" & " ~ outer if outer}}
{%- set shape = ("BLOCK_M", "BLOCK_N") %}
    {{store_output(("idx_m", "idx_n"), "acc", "mask", val_shape=shape)}}
"""


@dataclass(frozen=True)
class Tile:
    """Rows, columns and terms of a block, its warps and stages."""

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    num_warps: int
    num_stages: int

    def shared(self, pixels: int, itemsize: int) -> int:
        """Bytes of shared memory: stages of what is multiplied, or the result's rows.

        What scales is staged too: of two images, or row by row.
        """
        scales = 2 if pixels >= self.BLOCK_M else self.BLOCK_M
        stages = self.num_stages * (self.BLOCK_M + scales + self.BLOCK_N) * self.BLOCK_K
        return max(stages, self.BLOCK_M * self.BLOCK_N) * itemsize


# The fastest of 48 on an H200 for one shape or another of EfficientNet's, RegNetY's, MobileNetV3's.
TILES = (
    Tile(128, 16, 32, 4, 3),
    Tile(128, 32, 32, 4, 4),
    Tile(128, 32, 64, 4, 4),
    Tile(128, 64, 32, 4, 3),
    Tile(64, 64, 64, 4, 4),
    Tile(64, 128, 64, 4, 4),
    Tile(128, 128, 64, 8, 4),
    Tile(64, 256, 64, 8, 4),
)
WIDEST = 256


def fits(tile: Tile, columns: int) -> bool:
    """Whether a block is no wider than the result, nor much narrower."""
    wide = min(WIDEST, max(16, 1 << (columns - 1).bit_length()))
    return wide == tile.BLOCK_N or (wide == WIDEST and wide == 2 * tile.BLOCK_N)


def constants(
    images: int, pixels: int, columns: int, terms: int, biased: bool, tile: Tile
) -> dict[str, Any]:
    """What the template is rendered with but ALLOW_TF32."""
    rows = images * pixels
    blocks = -(-rows // tile.BLOCK_M), -(-columns // tile.BLOCK_N)
    return {
        "ROWS": rows,
        "PIXELS": pixels,
        "COLUMNS": columns,
        "TERMS": terms,
        "BIASED": biased,
        "BLOCKS_N": blocks[1],
        "PROGRAMS": blocks[0] * blocks[1],
        "STAGES": tile.num_stages,
        "BLOCK_M": tile.BLOCK_M,
        "BLOCK_N": tile.BLOCK_N,
        "BLOCK_K": tile.BLOCK_K,
    }
