"""Triton template of BN+ReLU+conv1x1 on several concatenated activations.

Unfused, all their channels are read, concatenated and read again, which is most of a DenseNet's
memory traffic. Here each part is read from its own tensor, and the loaded values are scaled,
shifted and clamped on their way to the tensor cores, which take them from registers. The first part
may have any number of channels; the others are alike, and so narrow that a step of K takes whole
parts.
"""

from dataclasses import dataclass
from typing import Any

from ipex_inductor.templates.kernel_text import read_kernel_text

NAME = "ipex.triton.preactivated"

# Beyond the last row and column these are read again, and the results are not stored.
SOURCE = read_kernel_text("triton/batch_norm_relu.py.jinja")


@dataclass(frozen=True)
class Tile:
    """Rows (M), columns (N) and K of a block, its warps and stages."""

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    num_warps: int
    num_stages: int

    def shared(self, itemsize: int) -> int:
        """Return the bytes of shared memory: of the stages, or of a result if that is more.

        The operand that goes through registers has one stage less. The weight has one more, which a
        first part of a single step leaves there.
        """
        activation_bytes = (self.num_stages - 1) * (self.BLOCK_M * itemsize + 8)
        weight_bytes = (self.num_stages + 1) * self.BLOCK_N * itemsize
        return max(
            (activation_bytes + weight_bytes) * self.BLOCK_K, self.BLOCK_M * self.BLOCK_N * itemsize
        )


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
# Blocks of at most SMALL elements are too many beyond MOST for each multiprocessor.
SMALL, MOST = 64 * 64, 4
# Blocks for under 1 / FEWEST_PART of all multiprocessors are too few, if a smaller tile exists.
FEWEST_PART = 4
FEWEST = 16  # M, N and K of a GEMM on tensor cores


def lane(each: int) -> int:
    """Return the columns of a step that a part of `each` channels takes."""
    return max(FEWEST, 1 << (each - 1).bit_length()) if each else 0


def fits(tile: Tile, rows: int, columns: int, multiprocessors: int) -> bool:
    """Return whether blocks are no wider than the result, and neither too few nor too many."""
    narrow = max(FEWEST, 1 << (columns - 1).bit_length()) >= tile.BLOCK_N
    blocks = -(-rows // tile.BLOCK_M) * -(-columns // tile.BLOCK_N)
    small = tile.BLOCK_M * tile.BLOCK_N
    few = FEWEST_PART * blocks < multiprocessors and small > FEWEST * FEWEST
    return narrow and not few and (small > SMALL or blocks <= MOST * multiprocessors)


def constants(
    rows: int, columns: int, first: int, each: int, parts: int, biased: bool, tile: Tile
) -> dict[str, Any]:
    """Return the constants that the template is rendered with, except ALLOW_TF32.

    Args:
        rows: M.
        columns: N.
        first: the channels of the first part.
        each: the channels of every other part, at most as many as a step takes.
        parts: the number of other parts.
        biased: whether there is a bias.
        tile: the block sizes.
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
