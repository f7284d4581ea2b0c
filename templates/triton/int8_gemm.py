"""Triton template of a GEMM on 8-bit integers by persistent programs (Hopper).

Operands are loaded by TMA. Sums are exact 32-bit integers; each is multiplied by the factor of its
column, and gets the offset of that column. Tensor cores read 8-bit operands along K only, so the
weight lies as [N, K].
"""

from typing import Any

from ipex_inductor.ops.quant.int8_operands import MOST_PRODUCT
from ipex_inductor.templates.kernel_text import read_kernel_text
from ipex_inductor.templates.triton import persistent
from ipex_inductor.templates.triton.persistent import Tile

NAME = "ipex.triton.int8_gemm"

SOURCE = read_kernel_text("triton/int8_gemm.py.jinja")

TILES = (
    Tile(128, 256, 64, 8, 4),
    Tile(128, 128, 128, 8, 4),
    Tile(128, 128, 128, 4, 3),
    Tile(128, 128, 64, 4, 3),
    Tile(256, 64, 64, 8, 3),
    Tile(128, 64, 64, 4, 4),
    Tile(64, 128, 128, 4, 4),
    Tile(64, 64, 128, 4, 4),
)
FEWEST_ROWS = 64  # fewer rows are gathered by `int8_conv`
VECTOR = 16  # bytes; the alignment of a row that TMA needs


def constants(rows: int, columns: int, terms: int, tile: Tile, programs: int) -> dict[str, Any]:
    """Return the constants that the template is rendered with.

    Args:
        rows: M.
        columns: N.
        terms: K.
        tile: the block sizes.
        programs: how many fit on the device at once.
    """
    given = persistent.constants(rows, columns, terms, False, tile, programs)
    return {**given, "MOST_SUM": terms * MOST_PRODUCT}
