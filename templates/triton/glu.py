"""Triton template of a GLU (a gated pair of GEMMs) with a large K, by persistent programs.

As in `templates/triton/persistent.py`, but a block of rows is multiplied by both weights as it is
loaded, and one block is written: the activation of one GEMM, times the other.
"""

from dataclasses import dataclass
from typing import Any

from ipex_inductor.ops.pointwise.gelu import CLAMP, MILLS
from ipex_inductor.templates.kernel_text import fill_values, read_kernel_text
from ipex_inductor.templates.triton import persistent

NAME = "ipex.triton.gated"

_HIGHEST, _SECOND, *_REST = MILLS
# Activations are those of `ops/pointwise/gelu.py`.
SOURCE = fill_values(
    read_kernel_text("triton/glu.py.jinja"),
    CLAMP=f"{CLAMP}",
    HIGHEST=f"{_HIGHEST}",
    SECOND=f"{_SECOND}",
    REST="\n".join(f"        ratio = ratio * near + {factor}" for factor in _REST),
)
UNARY = ("silu", "gelu", "gelu_tanh")


@dataclass(frozen=True)
class Tile(persistent.Tile):
    """Rows (M), columns (N) and K of a block, its warps and stages."""

    def shared(self, itemsize: int) -> int:
        """Return the bytes of shared memory: stages of three factors, barriers, result rows."""
        stages = self.num_stages * (self.BLOCK_M + 2 * self.BLOCK_N) * self.BLOCK_K * itemsize
        return stages + 2 * self.BLOCK_M * self.BLOCK_N + 64


# The tiles of `templates/triton/persistent.py`, half as wide: each column has two sums.
TILES = (Tile(128, 128, 64, 8, 3), Tile(128, 64, 64, 4, 3))


def constants(
    rows: int, columns: int, terms: int, biased: bool, unary: str, tile: Tile, programs: int
) -> dict[str, Any]:
    """Return the constants that the template is rendered with, except ALLOW_TF32.

    Args:
        rows: M.
        columns: N.
        terms: K.
        biased: whether there is a bias.
        unary: the activation, one of `UNARY`.
        tile: the block sizes.
        programs: how many fit on the device at once.
    """
    gemm_constants = persistent.constants(rows, columns, terms, biased, tile, programs)
    return {**gemm_constants, "SILU": unary == "silu", "TANH": unary == "gelu_tanh"}
