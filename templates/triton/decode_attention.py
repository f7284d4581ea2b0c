"""Triton template of attention of few queries over a cache, for NVIDIA GPUs.

The queries that share a key are the rows of one tile, so a key is read once. The keys of a text and
a head are divided among `PARTS` programs, which take blocks of BLOCK_N keys in turn: whatever part
of a cache is written, all programs have a share of it. The last program of a head that ends adds up
the sums of all (flash decoding: Dao et al. 2023).

A program finds the first and the last visible key in the mask, and reads keys between them alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ipex_inductor.templates.kernel_text import fill_values, read_kernel_text

NAME = "ipex_decode_attention_rows"
BLOCK_M = 16  # rows of a tile of tensor cores; fewer queries are filled up with zeros
STEP_BYTES = 1 << 14  # of keys and values that one turn of the loop reads
MOST_PARTS = 32
PROGRAMS = 2  # of a multiprocessor, at most, where keys are divided
SCANNED = 4096  # elements of a mask that are loaded at a time
COMBINED = 1 << 13  # sums that the last program loads at a time
LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class Tile:
    """Keys of a block, programs that share the keys of a head, warps and stages of a program."""

    BLOCK_N: int
    parts: int
    num_warps: int = 4
    num_stages: int = 4


def choose_tile(groups: int, keys: int, width: int, multiprocessors: int) -> Tile:
    """Return the tile for a cache.

    Args:
        groups: texts times heads of keys.
        keys: the room of the cache.
        width: D.
        multiprocessors: of the device.
    """
    block = STEP_BYTES // (4 * _round_up(width))
    parts = min(-(-PROGRAMS * multiprocessors // groups), MOST_PARTS, -(-keys // block))
    return Tile(block, max(parts, 1))


@dataclass(frozen=True)
class Mask:
    """A mask as the kernel reads it.

    Args:
        added: whether its elements are added to the scores; otherwise they are bools, true for
            visible keys.
        rows: 1, or the number of queries.
        strides: of [B, H, Q, K], 0 where the mask is broadcast.
    """

    added: bool
    rows: int
    strides: Sequence[int]


def constants(
    shape: Sequence[int],
    keys: int,
    strides: Sequence[Sequence[int]],
    mask: Mask | None,
    scale: float,
    tile: Tile,
) -> dict[str, Any]:
    """Return the constants that the template is rendered with.

    Args:
        shape: [B, H, Q, D] of the queries.
        keys: K.
        strides: of queries, keys and values, each of four dimensions.
        mask: the mask, or None.
        scale: factor of the scores.
        tile: the block sizes.
    """
    batch, heads, rows, width = shape
    block_d, block_p = _round_up(width), _round_up(tile.parts)
    named = _name_strides("Q", "ROW", strides[0])
    named |= _name_strides("K", "KEY", strides[1]) | _name_strides("V", "KEY", strides[2])
    if mask is not None:
        names = ("TEXT", "HEAD", "ROW", "KEY")
        named |= {f"MASK_{n}": step for n, step in zip(names, mask.strides, strict=True)}
    return named | {
        "GROUPS": batch * heads,
        "HEADS": heads,
        "ROWS": rows,
        "WIDTH": width,
        "KEYS": keys,
        "MASKED": mask is not None,
        "ADDED": mask is not None and mask.added,
        "MASK_ROWS": mask.rows if mask else 1,
        "SCAN": min(_round_up(keys), SCANNED),
        "SCALE": scale * LOG2_E,
        "LOG2_E": LOG2_E,
        "BLOCK_M": BLOCK_M,
        "BLOCK_N": tile.BLOCK_N,
        "BLOCK_D": block_d,
        "PARTS": tile.parts,
        "BLOCK_P": block_p,
        "STEP": max(min(COMBINED // (block_p * block_d), BLOCK_M), 1),
        "STAGES": tile.num_stages,
    }


def workspace(shape: Sequence[int], tile: Tile) -> int:
    """Return the bytes for the parts of [B, H, Q, D]: their sums, and two numbers a row."""
    batch, heads, rows, width = shape
    return 4 * batch * heads * rows * (width + 2) * tile.parts if tile.parts > 1 else 0


def source(workspace: str = "ws_ptr") -> str:
    """Return the template: Q [B, H, Q, D], K and V [B, H, K, D], and a mask of bools or addends.

    Args:
        workspace: the name of the pointer to the workspace.
    """
    text = read_kernel_text("triton/decode_attention.py.jinja")
    return fill_values(text, workspace=workspace)


def _name_strides(name: str, line: str, strides: Sequence[int]) -> dict[str, int]:
    return {f"{name}_{n}": s for n, s in zip(("TEXT", "HEAD", line), strides[:3], strict=True)}


def _round_up(size: int) -> int:
    """Return the next power of two."""
    return 1 << (size - 1).bit_length()
