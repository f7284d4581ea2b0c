"""Triton template of a weight-stationary GEMM on 8-bit integers, as `weight_stationary.py` is."""

from typing import Any

from ipex_inductor.ops.quant.int8_operands import MOST_PRODUCT
from ipex_inductor.templates.kernel_text import read_kernel_text
from ipex_inductor.templates.triton import weight_stationary
from ipex_inductor.templates.triton.weight_stationary import Tile

NAME = "ipex.triton.int8_streamed"

SOURCE = read_kernel_text("triton/int8_streamed.py.jinja")

TILES = (
    Tile(128, 128, 8, 3, 2),
    Tile(64, 256, 8, 3, 2),
    Tile(64, 128, 4, 3, 4),
    Tile(64, 64, 4, 3, 6),
    Tile(128, 64, 4, 3, 4),
)
MOST_TERMS = 512  # K, which a block takes at once


def constants(rows: int, columns: int, terms: int, tile: Tile, programs: int) -> dict[str, Any]:
    """Return the constants that the template is rendered with.

    Args:
        rows: M.
        columns: N.
        terms: K.
        tile: the block sizes.
        programs: how many fit on the device at once.
    """
    deepest = max(32, weight_stationary.depth(terms))
    given = weight_stationary.constants(rows, columns, terms, False, tile, programs)
    return {**given, "BLOCK_K": deepest, "MOST_SUM": terms * MOST_PRODUCT}
