"""Triton for a convolution of one pixel of what a batch norm and a relu make of several images.

Apart, all their channels are read, written side by side and read again, which is most of what a
DenseNet moves. Here nothing is: each part is read where it lies, and what is loaded is scaled,
shifted and cut off on its way to the tensor cores, which take it from registers. The first part is
as wide as it likes; the others are alike, and so narrow that a step of the sum takes whole ones.
"""

from dataclasses import dataclass
from typing import Any

NAME = "ipex.triton.preactivated"

# To Inductor's hooks, or those of who renders it alone. Beyond the last row and column those are
# read again, and what comes of it is not stored.
SOURCE = """\
{%- set parts = namespace(names=[]) %}
{%- for i in range(PARTS) %}{% set parts.names = parts.names + ["P%d" % i] %}{% endfor %}
{%- if BIASED %}{{def_kernel("X", "A", "W", "BIAS", *parts.names)}}
{%- else %}{{def_kernel("X", "A", "W", *parts.names)}}{% endif %}
    # Neighbours share rows, which the cache then has.
    block = tl.program_id(0)
    row = tl.arange(0, BLOCK_M).to(INDEX_DTYPE) + block // BLOCKS_N * BLOCK_M
    column = tl.arange(0, BLOCK_N).to(INDEX_DTYPE) + block % BLOCKS_N * BLOCK_N
    pixel = {{"tl.minimum(row, ROWS - 1)" if ROWS % BLOCK_M else "row"}}
    used = {{"tl.minimum(column, COLUMNS - 1)" if COLUMNS % BLOCK_N else "column"}}
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    term = tl.arange(0, BLOCK_K)
    given = X + (pixel * FIRST)[:, None] + term[None, :]
    weights = W + (used * TERMS)[None, :] + term[:, None]
    for k in tl.range(0, FIRST, BLOCK_K, num_stages=STAGES):
{%- if FIRST % BLOCK_K %}
        there = term < FIRST - k
        left = tl.load(given + k, mask=there[None, :], other=0.0)
        scale = tl.load(A + k + term, mask=there, other=0.0)
        shift = tl.load(A + TERMS + k + term, mask=there, other=0.0)
        right = tl.load(weights + k, mask=there[:, None], other=0.0)
{%- else %}
        left = tl.load(given + k)
        scale = tl.load(A + k + term)
        shift = tl.load(A + TERMS + k + term)
        right = tl.load(weights + k)
{%- endif %}
        made = left.to(tl.float32) * scale[None, :] + shift[None, :]
        made = tl.maximum(made, 0.0, propagate_nan=tl.PropagateNan.ALL).to(left.dtype)
        acc = tl.dot(made, right, acc, allow_tf32=ALLOW_TF32)
{%- if PARTS %}
    # So many parts a step, each in its own columns.
    beside = tl.arange(0, ABREAST * LANE)
    which = beside // LANE
    channel = beside % LANE
    at = (pixel * EACH)[:, None] + channel[None, :]
    behind = FIRST + which * EACH + channel
    weights = W + (used * TERMS)[None, :] + behind[:, None]
    for part in tl.range(0, PARTS, ABREAST, num_stages=STAGES):
{%- for j in range(ABREAST) %}
        source{{j}} = P{{j if j < PARTS else 0}}
{%- for i in range(j + ABREAST, PARTS, ABREAST) %}
        source{{j}} = tl.where(part == {{i - j}}, P{{i}}, source{{j}})
{%- endfor %}
{%- endfor %}
        source = source0
{%- for j in range(1, ABREAST) %}
        source = tl.where(which == {{j}}, source{{j}}, source)
{%- endfor %}
        address = source{{"[None, :]" if ABREAST > 1}} + at
        k = part * EACH
{%- if EACH != LANE or PARTS % ABREAST %}
        there = (channel < EACH) & (which < PARTS - part)
        left = tl.load(address, mask=there[None, :], other=0.0)
        scale = tl.load(A + k + behind, mask=there, other=0.0)
        shift = tl.load(A + TERMS + k + behind, mask=there, other=0.0)
        right = tl.load(weights + k, mask=there[:, None], other=0.0)
{%- else %}
        left = tl.load(address)
        scale = tl.load(A + k + behind)
        shift = tl.load(A + TERMS + k + behind)
        right = tl.load(weights + k)
{%- endif %}
        made = left.to(tl.float32) * scale[None, :] + shift[None, :]
        made = tl.maximum(made, 0.0, propagate_nan=tl.PropagateNan.ALL).to(left.dtype)
        acc = tl.dot(made, right, acc, allow_tf32=ALLOW_TF32)
{%- endif %}
{%- if BIASED %}
    bias = tl.load(BIAS + used)
    acc += bias.to(tl.float32)[None, :]
{%- endif %}
    idx_m = row[:, None]
    idx_n = column[None, :]
    mask = (row < ROWS)[:, None]{{" & (column < COLUMNS)[None, :]" if COLUMNS % BLOCK_N}}
    {{store_output(("idx_m", "idx_n"), "acc", "mask", val_shape=("BLOCK_M", "BLOCK_N"))}}
"""


@dataclass(frozen=True)
class Tile:
    """Rows, columns and terms of a block, its warps and stages."""

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    num_warps: int
    num_stages: int

    def shared(self, itemsize: int) -> int:
        """Bytes of shared memory: stages, of what goes through registers one less; or a result.

        Of the weight there is a step more, which a first part of one step leaves there.
        """
        left = (self.num_stages - 1) * (self.BLOCK_M * itemsize + 8)
        right = (self.num_stages + 1) * self.BLOCK_N * itemsize
        return max((left + right) * self.BLOCK_K, self.BLOCK_M * self.BLOCK_N * itemsize)


# Of 29 on an H200 within 0.5 % of the fastest each in all, for 19 layers of DenseNet-121 with 64
# images and with one; one part a step (32 terms) and two were timed.
TILES = (
    Tile(128, 128, 64, 4, 3),
    Tile(128, 128, 32, 4, 3),
    Tile(128, 128, 32, 4, 4),
    Tile(64, 256, 64, 4, 3),
    Tile(64, 64, 64, 4, 4),
    Tile(64, 32, 64, 4, 4),
    Tile(16, 64, 64, 4, 4),
    Tile(16, 32, 64, 2, 5),
    Tile(16, 16, 64, 2, 8),
)
# Elements of a block, and less, of which more than so many for each multiprocessor are too many.
SMALL, MOST = 64 * 64, 4
FEWEST_PART = 4  # blocks for a part of all multiprocessors are too few, where smaller ones are left
FEWEST = 16  # rows, columns and terms of a product


def lane(each: int) -> int:
    """Columns of a step that a part of so many channels takes."""
    return max(FEWEST, 1 << (each - 1).bit_length()) if each else 0


def fits(tile: Tile, rows: int, columns: int, multiprocessors: int) -> bool:
    """Whether blocks are no wider than the result, and neither too few nor too many."""
    narrow = max(FEWEST, 1 << (columns - 1).bit_length()) >= tile.BLOCK_N
    blocks = -(-rows // tile.BLOCK_M) * -(-columns // tile.BLOCK_N)
    small = tile.BLOCK_M * tile.BLOCK_N
    few = FEWEST_PART * blocks < multiprocessors and small > FEWEST * FEWEST
    return narrow and not few and (small > SMALL or blocks <= MOST * multiprocessors)


def constants(
    rows: int, columns: int, first: int, each: int, parts: int, biased: bool, tile: Tile
) -> dict[str, Any]:
    """What the template is rendered with but ALLOW_TF32: `parts` of `each` channels behind `first`.

    `each` are at most what a step takes.
    """
    blocks = -(-rows // tile.BLOCK_M), -(-columns // tile.BLOCK_N)
    return {
        "ROWS": rows,
        "COLUMNS": columns,
        "FIRST": first,
        "EACH": each,
        "PARTS": parts,
        "TERMS": first + parts * each,
        "LANE": lane(each),
        "ABREAST": tile.BLOCK_K // lane(each) if parts else 0,
        "BIASED": biased,
        "BLOCKS_N": blocks[1],
        "PROGRAMS": blocks[0] * blocks[1],
        "STAGES": tile.num_stages,
        "BLOCK_M": tile.BLOCK_M,
        "BLOCK_N": tile.BLOCK_N,
        "BLOCK_K": tile.BLOCK_K,
    }
