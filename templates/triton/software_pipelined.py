"""Triton template of a GEMM with a large K whose result TMA does not write: a block a program.

Operands are loaded by plain loads, some steps before they are multiplied, as Triton pipelines the
loop.
"""

from dataclasses import dataclass
from typing import Any

from ipex_inductor.templates.kernel_text import read_kernel_text
from ipex_inductor.templates.triton import persistent

NAME = "ipex.triton.pipelined"

# Beyond the last row and column these are read again, and the results are not stored: loads need no
# mask.
SOURCE = read_kernel_text("triton/software_pipelined.py.jinja")


# Hopper and Blackwell have TMA: there these are for results whose rows it cannot write.
UNEVEN = ("sm_90", "sm_10")
BARRIER = 16  # bytes


@dataclass(frozen=True)
class Tile(persistent.Tile):
    """Rows (M), columns (N) and K of a block, its warps and stages."""

    def shared(self, itemsize: int, arch: str = "") -> int:
        """Return the bytes of shared memory: all stages, or the result in rows.

        Before Hopper one stage less, which is in registers; from Hopper on, with a barrier.
        """
        later = arch.startswith(UNEVEN)
        held = self.num_stages - (not later)
        step = (self.BLOCK_M + self.BLOCK_N) * self.BLOCK_K
        return itemsize * max(held * step, self.BLOCK_M * self.BLOCK_N) + BARRIER * later

    def is_full(self, lanes: int) -> bool:
        """Return whether sums take half of a thread's registers, with `lanes` threads a warp."""
        return self.BLOCK_M * self.BLOCK_N // (lanes * self.num_warps) >= 128


CDNA = ("gfx908", "gfx90a", "gfx94", "gfx95")
# By how architectures begin: Ampere's and Ada's; later ones'; CDNA's, with 64 lanes a warp and a
# stage in registers. Common sizes; behind a bias and an addend nothing spills. Timed were Hopper's,
# where one of 64 rows and 256 columns was never the best and is left out.
TILES = {
    ("sm_8",): (
        Tile(128, 256, 32, 8, 3),
        Tile(256, 128, 32, 8, 3),
        Tile(128, 128, 32, 4, 4),
        Tile(128, 128, 64, 8, 5),
        Tile(128, 64, 32, 4, 4),
        Tile(64, 64, 64, 4, 4),
    ),
    UNEVEN: (
        Tile(128, 256, 64, 8, 3),
        Tile(128, 128, 64, 8, 3),
        Tile(64, 128, 64, 4, 3),
        Tile(64, 64, 64, 4, 4),
    ),
    CDNA: (
        Tile(256, 128, 64, 8, 2),
        Tile(128, 256, 64, 8, 2),
        Tile(128, 128, 64, 4, 2),
        Tile(128, 64, 64, 4, 2),
        Tile(64, 64, 64, 4, 2),
    ),
}
FEWEST_TERMS = 256  # K; smaller GEMMs are weight-stationary
VECTOR = 16  # bytes; the alignment of rows that asynchronous copies need
EVERY = 2**31  # programs; more than there are blocks


def tiles(arch: str) -> tuple[Tile, ...]:
    """Return the tiles for an architecture; none if another template is better there."""
    return next((arch_tiles for start, arch_tiles in TILES.items() if arch.startswith(start)), ())


def constants(rows: int, columns: int, terms: int, biased: bool, tile: Tile) -> dict[str, Any]:
    """Return the constants that the template is rendered with, except ALLOW_TF32.

    Args:
        rows: M.
        columns: N.
        terms: K.
        biased: whether there is a bias.
        tile: the block sizes.
    """
    return persistent.constants(rows, columns, terms, biased, tile, programs=EVERY)
