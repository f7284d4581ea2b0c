"""Triton template of a GEMM with a large K, by persistent programs.

Operands are loaded by TMA, as descriptors say (by plain loads without TMA). Both loops are
flattened into one, so that the next block's operands are loading while this one's epilogue is
computed.
"""

from dataclasses import dataclass
from typing import Any

from ipex_inductor.templates.kernel_text import read_kernel_text

NAME = "ipex.triton.persistent"

SOURCE = read_kernel_text("triton/persistent.py.jinja")


@dataclass(frozen=True)
class Tile:
    """Rows (M), columns (N) and K of a block, its warps and stages."""

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    num_warps: int
    num_stages: int

    def shared(self, itemsize: int) -> int:
        """Return the bytes of shared memory: stages, barriers, and the final transposition."""
        stages = self.num_stages * (self.BLOCK_M + self.BLOCK_N) * self.BLOCK_K * itemsize
        return stages + self.BLOCK_M * self.BLOCK_N + 64


# The fastest of 15 on an H200 for K of 768, 1024 and 4096; warp specialization was slower. Two
# programs a multiprocessor help if memory is a limit too: one adds while the other multiplies.
TILES = (Tile(128, 256, 64, 8, 3), Tile(128, 128, 64, 4, 3))
MOST_ADDED = 128 * 128  # elements of a block with an addend: Triton 3.6 spills for larger ones
GROUP = 8  # blocks of rows that share columns
FEWEST = {"rows": 1024, "terms": 256}
VECTOR = 16  # bytes; the alignment of a row that TMA needs


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
    return {
        "ROWS": rows,
        "COLUMNS": columns,
        "TERMS": terms,
        "BIASED": biased,
        "BLOCKS_M": blocks[0],
        "BLOCKS_N": blocks[1],
        "PROGRAMS": min(programs, blocks[0] * blocks[1]),
        "STAGES": tile.num_stages,
        "GROUP_M": GROUP,
        "BLOCK_M": tile.BLOCK_M,
        "BLOCK_N": tile.BLOCK_N,
        "BLOCK_K": tile.BLOCK_K,
    }
