"""Triton template of sums of columns and of their squares, reading each element once.

Loads are of 16 bytes.

A program takes a block of columns and every n-th block of rows: it adds to blocks of sums in
registers, and joins the rows of these at its end. It stores the parts of a channel side by side for
the kernel that adds them up.
"""

from dataclasses import dataclass
from typing import Any

from ipex_inductor.ops.pointwise.moments import SAMPLES, sample_distance
from ipex_inductor.templates.kernel_text import read_kernel_text

SOURCE = read_kernel_text("triton/moments.py.jinja")
SLOTS = 4  # sum, sum of squares, shift: the next power of two


@dataclass(frozen=True)
class Tile:
    """Rows and columns of a block, its warps and stages, and programs of a multiprocessor."""

    BLOCK_M: int
    BLOCK_C: int
    num_warps: int
    num_stages: int
    programs: int


# On an H200 the best of twelve for nearly all shapes of ResNet-50, within 1 % for the rest.
TILE = Tile(128, 64, 8, 3, 2)
# By architecture, the least elements of an activation for which it was measured to be faster than
# Inductor's kernels (1.05 to 1.9 times; for half as many it was slower).
FASTER = {"sm_90": 128 * 256 * 14 * 14}
VECTOR = 8  # elements of 16 bits that a load takes


def parts_of(rows: int, columns: int, tile: Tile, multiprocessors: int) -> int:
    """Return how many programs share a block of columns, with equal numbers of row blocks."""
    blocks, wide = -(-rows // tile.BLOCK_M), -(-columns // tile.BLOCK_C)
    blocks_per_part = -(-blocks // max(1, multiprocessors * tile.programs // wide))
    return -(-blocks // blocks_per_part)


def constants(rows: int, columns: int, parts: int, tile: Tile) -> dict[str, Any]:
    """Return the constants that the template is rendered with."""
    return {
        "ROWS": rows,
        "COLUMNS": columns,
        "PARTS": parts,
        "BLOCKS_M": -(-rows // tile.BLOCK_M),
        "BLOCKS_C": -(-columns // tile.BLOCK_C),
        "BLOCK_M": tile.BLOCK_M,
        "BLOCK_C": tile.BLOCK_C,
        "STAGES": tile.num_stages,
        "SAMPLES": SAMPLES,
        "SAMPLED": sample_distance(rows),
        "SLOTS": SLOTS,
    }
