"""Triton template of a weight-stationary GEMM: many rows and a small weight, bound by memory.

A program keeps its block of the weight in shared memory, and goes through rows: the operands, and
addends of an epilogue, are loading some blocks before they are needed, as Triton pipelines every
load of a loop with a number of stages.
"""

from dataclasses import dataclass
from typing import Any

from ipex_inductor.templates.kernel_text import read_kernel_text

NAME = "ipex.triton.streamed"

SOURCE = read_kernel_text("triton/weight_stationary.py.jinja")


@dataclass(frozen=True)
class Tile:
    """Rows (M) and columns (N) of a block, warps, stages; programs of a multiprocessor, at most."""

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int
    programs: int

    def shared(self, terms: int, itemsize: int, added: bool) -> int:
        """Return the bytes of shared memory: a weight block, the stages of x, and the result.

        An addend has one stage less. The result is transposed there to rows before it is written.
        """
        staged = self.num_stages * depth(terms) + (self.num_stages - 1) * self.BLOCK_N * added
        return itemsize * (self.BLOCK_N * depth(terms) + self.BLOCK_M * (staged + self.BLOCK_N))

    def fitting(self, room: int, terms: int, itemsize: int, added: bool) -> int:
        """Return how many programs a multiprocessor with `room` bytes of shared memory holds."""
        return min(self.programs, room // self.shared(terms, itemsize, added))


# The fastest of 22 on an H200 for one shape or another of ResNet-50's; by TMA they were no faster.
TILES = (
    Tile(128, 128, 8, 3, 1),
    Tile(64, 256, 8, 3, 1),
    Tile(64, 128, 4, 2, 3),
    Tile(64, 128, 8, 3, 2),
    Tile(64, 64, 4, 3, 4),
)
FEWEST_ROWS = 4096  # with fewer, a program has too few blocks for a pipeline
MOST_TERMS = 256  # K, which a block takes at once
NARROWEST = 64  # columns of a block
IN_FLIGHT = 3  # stages of all programs of a multiprocessor; fewer were up to 1.6 times slower


def fits(tile: Tile, columns: int) -> bool:
    """Return whether a block is no wider than the result, nor much narrower."""
    wide = max(NARROWEST, 1 << (columns - 1).bit_length())
    return tile.BLOCK_N in (wide, wide // 2) or (tile.BLOCK_N >= 2 * NARROWEST and wide > 256)


def depth(terms: int) -> int:
    """Return the K of a block, a power of two."""
    return max(16, 1 << (terms - 1).bit_length())


def constants(
    rows: int, columns: int, terms: int, biased: bool, tile: Tile, programs: int
) -> dict[str, Any]:
    """Return the constants that the template is rendered with, except ALLOW_TF32.

    Args:
        rows: M.
        columns: N.
        terms: K.
        biased: whether there is a bias.
        tile: the block sizes.
        programs: how many fit on the device at once.
    """
    blocks = -(-rows // tile.BLOCK_M), -(-columns // tile.BLOCK_N)
    step = min(blocks[0], max(1, programs // blocks[1]))
    return {
        "ROWS": rows,
        "COLUMNS": columns,
        "TERMS": terms,
        "BIASED": biased,
        "BLOCKS_M": blocks[0],
        "BLOCKS_N": blocks[1],
        "STEP": step,
        "PROGRAMS": step * blocks[1],
        "STAGES": tile.num_stages,
        "BLOCK_M": tile.BLOCK_M,
        "BLOCK_N": tile.BLOCK_N,
        "BLOCK_K": depth(terms),
    }
