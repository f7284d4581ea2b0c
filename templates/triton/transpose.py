"""Triton template that transposes a matrix of bytes, a block at a time in registers.

Inductor would write the transposed matrix in the kernel that computes it row by row: single bytes,
each in another sector of memory.
"""

from dataclasses import dataclass
from typing import Any

from ipex_inductor.templates.kernel_text import read_kernel_text

SOURCE = read_kernel_text("triton/transpose.py.jinja")


@dataclass(frozen=True)
class Tile:
    """Rows and columns of a block, its warps and stages."""

    BLOCK_M: int
    BLOCK_C: int
    num_warps: int
    num_stages: int


TILE = Tile(128, 128, 8, 1)


def constants(rows: int, columns: int, tile: Tile) -> dict[str, Any]:
    """Return the constants that the template is rendered with."""
    return {
        "ROWS": rows,
        "COLUMNS": columns,
        "BLOCKS_M": -(-rows // tile.BLOCK_M),
        "BLOCKS_C": -(-columns // tile.BLOCK_C),
        "BLOCK_M": tile.BLOCK_M,
        "BLOCK_C": tile.BLOCK_C,
    }
