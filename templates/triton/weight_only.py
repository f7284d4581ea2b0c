"""Triton template of linear layers on quantized weights, for NVIDIA GPUs.

A program has BLOCK_N rows of the weight and loads them as they are stored. They become exact
integers (or levels of NF4, or FP8 numbers) of the activations' dtype in registers, which are the
left factor of tensor cores. Sums of each group are multiplied by its scale in fp32. Groups smaller
than a step are scaled before: then the scaled weight is rounded, as the op's reference does it.

`FACTORS` has a 32-bit word for each group and row: the scale's 16 bits, above them the 16 bits of
`offset`, which is what a weight's bits are shifted by. It lies as [groups, N], so that the rows of
a program are beside each other. Wide scales are [groups, N] in fp32, then the offsets in fp32.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch

from ipex_inductor.ops.quant.weight_only import INTEGERS, NF4, NIBBLES, SYMMETRIC
from ipex_inductor.ops.quant.weight_only_rows import BASES
from ipex_inductor.templates import weight_only_ptx
from ipex_inductor.templates.kernel_text import fill_values, read_kernel_text

NAME = "ipex.triton.weight_only"
FORMATS = ("int4", "int8", "nf4", "fp8")
TRITON_DTYPES = {"bfloat16": "tl.bfloat16", "float16": "tl.float16", "float32": "tl.float32"}
DTYPES = ("bfloat16", "float16")  # of activations
ZEROED = tuple(INTEGERS)  # formats that may have zero points
SMALLEST_GROUP = 32
LEAST_DEPTH = 64  # K of a step, at least
MOST_WARPS_TO_DIVIDE = 4
LEAST_STEPS = 2  # of a part of K
MOST_BLOCK = 128  # rows of a tile


@dataclass(frozen=True)
class Decoding:
    """Conversion of stored bits to elements of a factor.

    Args:
        weight_dtype: a key of `ops.quant.weight_only.STORED`.
        dtype: of the activations, "bfloat16" or "float16".
        scale_dtype: of the scales.
        zeroed: whether groups have zero points.
        stepped: whether activations are integers, each group of a row with a scale of its own.
    """

    weight_dtype: str
    dtype: str
    scale_dtype: str
    zeroed: bool
    stepped: bool = False

    @property
    def name(self) -> str:
        """Return the name of the template."""
        words = self.weight_dtype, self.dtype, self.scale_dtype
        ends = "_zeroed" * self.zeroed + "_stepped" * self.stepped
        return "_".join(("ipex_weight_only", *words)) + ends

    @property
    def nibbles(self) -> bool:
        """Return whether a byte has two elements."""
        return self.weight_dtype in NIBBLES

    @property
    def wide(self) -> bool:
        """Return whether scales are in fp32."""
        return self.scale_dtype == "float32"


@dataclass(frozen=True)
class Tile:
    """Rows (M), columns (N) and K of a block, parts of K, warps, stages, and blocks of K a turn."""

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    parts: int
    num_warps: int
    num_stages: int
    unroll: int = 1

    def steps(self, terms: int) -> int:
        """Return the turns of the loop over a part of K."""
        return -(-terms // (self.BLOCK_K * self.unroll * self.parts))

    def used_parts(self, terms: int) -> int:
        """Return how many parts have steps."""
        return -(-terms // (self.BLOCK_K * self.unroll * self.steps(terms)))

    def blocks(self, rows: int, columns: int) -> int:
        """Return the number of programs that share no K."""
        return -(-rows // self.BLOCK_M) * -(-columns // self.BLOCK_N)

    def shared(self, nibbles: bool) -> int:
        """Return the bytes of shared memory, about: stages of both factors."""
        weight = self.BLOCK_N * self.BLOCK_K // (2 if nibbles else 1)
        x = 2 * self.BLOCK_M * self.BLOCK_K
        return (weight + x + 4 * self.BLOCK_N) * self.num_stages * self.unroll

    @property
    def is_many(self) -> bool:
        """Return whether tensor cores read activations from shared memory, as Hopper's can."""
        return self.num_warps >= HOPPER_WARPS


# From that many warps on Triton uses Hopper's wgmma, whose right factor is in shared memory.
HOPPER_WARPS = 4


def constants(
    rows: int, columns: int, terms: int, group_size: int, decoding: Decoding, tile: Tile
) -> dict[str, Any]:
    """Return the constants that the template is rendered with.

    Args:
        rows: M.
        columns: N.
        terms: K.
        group_size: elements along K that share a scale.
        decoding: of the weight.
        tile: the block sizes.
    """
    elements = 2 if decoding.nibbles else 1
    groups = -(-terms // group_size)
    return {
        "ROWS": rows,
        "COLUMNS": columns,
        "TERMS": terms,
        "LINE": -(-terms // elements),
        "PLACES": tile.BLOCK_K // elements,
        "GROUP": group_size,
        "GROUPS": groups,
        "INNER": tile.BLOCK_K // group_size if groups > 1 and group_size < tile.BLOCK_K else 1,
        "STEPS": tile.steps(terms),
        "PARTS": tile.used_parts(terms),
        "UNROLL": tile.unroll,
        "TAIL": tile.steps(terms) * tile.used_parts(terms) * tile.unroll * tile.BLOCK_K != terms,
        "BLOCKS_M": -(-rows // tile.BLOCK_M),
        "BLOCKS_N": -(-columns // tile.BLOCK_N),
        "BLOCK_M": tile.BLOCK_M,
        "BLOCK_N": tile.BLOCK_N,
        "BLOCK_K": tile.BLOCK_K,
        "STAGES": tile.num_stages,
        "NIBBLES": decoding.nibbles,
        "PAIRS": decoding.nibbles and not tile.is_many,
        "WIDE": decoding.wide,
        "ZEROED": decoding.zeroed,
        "STEPPED": decoding.stepped,
    }


@functools.cache
def source(decoding: Decoding, ptx: bool = True) -> str:
    """Return the template's text.

    Args:
        decoding: of the weight.
        ptx: whether the weight is decoded by PTX; else by operations of Triton, which its
            interpreter knows.
    """
    text = read_kernel_text("triton/weight_only.py.jinja")
    decode = _decode_in_ptx(decoding) if ptx else _decode(decoding)
    lines = "\n".join(f"        {line}" for line in decode)
    dtypes = {"dtype": decoding.dtype, "scale_dtype": decoding.scale_dtype}
    values = {name: TRITON_DTYPES[dtype] for name, dtype in dtypes.items()}
    # Loads of integers, as Triton has no zeros of FP8 for what a mask leaves out.
    is_fp8 = decoding.weight_dtype == "fp8"
    stored = "W.to(tl.pointer_type(tl.uint8))" if is_fp8 else "W"
    return fill_values(fill_values(text, decode=lines, stored=stored), **values)


def _decode_in_ptx(decoding: Decoding) -> list[str]:
    name, dtype, zeroed = decoding.weight_dtype, decoding.dtype, decoding.zeroed
    body = weight_only_ptx.instructions(name, dtype, zeroed)
    results = 4 if decoding.nibbles else 2
    registers = ",".join(["=r"] * results + ["r"] * (3 if zeroed else 1))
    types = "({{dtype}}, {{dtype}})" if decoding.nibbles else "{{dtype}}"
    return [
        f"{'weight, odd_weight' if decoding.nibbles else 'weight'} = tl.inline_asm_elementwise(",
        *(f'    "{line}"' for line in body[:-1]),
        f'    "{body[-1]}",',
        f'    "{registers}", [stored{", offsets" if zeroed else ""}], dtype={types},',
        "    is_pure=True, pack=4,",
        ")",
    ]


def _decode(decoding: Decoding) -> list[str]:
    name = decoding.weight_dtype
    if name == "fp8":
        return ["weight = stored.to(tl.float8e4nv, bitcast=True).to({{dtype}})"]
    parts = (
        {"weight": "stored.to(tl.int32) & 15", "odd_weight": "stored.to(tl.int32) >> 4"}
        if decoding.nibbles
        else {"weight": "stored.to(tl.int32)"}
    )
    if name == "nf4":
        return [line for part, code in parts.items() for line in _look_up(part, code)]
    base = BASES.get((name, getattr(torch, decoding.dtype)), 0)
    shift = f"(offsets.to(tl.float32) + {base})" if decoding.zeroed else -SYMMETRIC[name]
    return [
        f"{part} = (({code}).to(tl.float32) + {shift}).to({{{{dtype}}}})"
        for part, code in parts.items()
    ]


def _look_up(part: str, code: str) -> list[str]:
    choices = [f"{part} = tl.where(code == {i}, {value}, {part})" for i, value in enumerate(NF4)]
    zeros = f"{part} = tl.zeros([BLOCK_N, PLACES], tl.float32)"
    return [f"code = {code}", zeros, *choices, f"{part} = {part}.to({{{{dtype}}}})"]


# Tiles of up to 32 rows multiply by mma.sync, in programs of two warps: four would use wgmma, for
# which each element of the weight takes twice as many instructions. An H200 needs about 26 kB in
# flight on each multiprocessor, and pieces of a row that are longer than 64 bytes: with these, int4
# reached 2.4 TB/s, while 128 bytes a piece of int8 are read faster.
FEW = tuple(
    Tile(rows, columns, terms, parts, 2, 5 if unroll == 1 else 4, unroll)
    for rows in (8, 16, 32)
    for columns in (32, 64)
    for terms, unroll in ((64, 1), (64, 4), (128, 1), (128, 2))
    for parts in (1, 2, 4, 8)
)
SOME = tuple(
    Tile(64, columns, terms, parts, 4, 3)
    for columns in (64, 128)
    for terms in (64, 128)
    for parts in (1, 2, 4)
)
MANY = tuple(
    Tile(128, columns, terms, parts, columns // 16, 3)
    for columns in (64, 128)
    for terms in (64, 128)
    for parts in (1, 2, 4)
)
TILES = (*FEW, *SOME, *MANY)
# By numbers of rows up to which they are: programs for each multiprocessor that hide the latency
# of each other's loads and instructions. More parts of K make larger sums for the next kernel.
ENOUGH = {8: 6.0, 32: 3.0, 64: 3.0, math.inf: 1.5}
MOST_WIDE = 32  # rows up to which the widest blocks are the fastest
PIECE = 128  # bytes of a row of the weight that a turn of the loop reads, at most
DEEP = 128  # K of a step, unless its rows of the weight are longer than a group


def fits(tile: Tile, rows: int, terms: int, group_size: int, stepped: bool = False) -> bool:
    """Return whether a tile is for a number of rows and a size of groups.

    Args:
        tile: the tile.
        rows: M.
        terms: K.
        group_size: elements along K that share a scale.
        stepped: see `Decoding`.
    """
    joins = group_size < terms and group_size < tile.BLOCK_K
    if group_size < terms and group_size % tile.BLOCK_K and (stepped or not joins):
        return False
    if joins and tile.BLOCK_K % group_size:
        return False
    # Triton 3.6 compiles loops wrongly that divide their counter, with eight warps.
    divides = group_size < terms and group_size > tile.BLOCK_K
    if divides and tile.num_warps > MOST_WARPS_TO_DIVIDE:
        return False
    if tile.used_parts(terms) != tile.parts or (tile.parts > 1 and tile.steps(terms) < LEAST_STEPS):
        return False
    return min(tile.BLOCK_M, MOST_BLOCK) == block_of_rows(rows)


def block_of_rows(rows: int) -> int:
    """Return M of the tiles for a number of rows."""
    return next((n for n in (8, 16, 32, 64) if rows <= n), MOST_BLOCK)


def why_not_groups(terms: int, group_size: int, stepped: bool = False) -> str | None:
    """Return why no tile is for a size of groups; None if there is one.

    Args:
        terms: K.
        group_size: elements along K that share a scale.
        stepped: see `Decoding`.
    """
    if group_size >= terms or group_size % LEAST_DEPTH == 0:
        return None
    if group_size == SMALLEST_GROUP and not stepped:
        return None
    small = "" if stepped else f"groups of {SMALLEST_GROUP}, "
    sizes = f"whole rows, {small}and groups of multiples of {LEAST_DEPTH}"
    return f"the kernel is for {sizes}, not of {group_size}"


def choose_tile(
    rows: int,
    columns: int,
    terms: int,
    group_size: int,
    multiprocessors: int,
    nibbles: bool,
    stepped: bool = False,
) -> Tile:
    """Return the tile that is used without a record.

    Args:
        rows: M.
        columns: N.
        terms: K.
        group_size: elements along K that share a scale.
        multiprocessors: of the device.
        nibbles: whether a byte has two elements.
        stepped: see `Decoding`.
    """
    least = multiprocessors * next(n for most, n in ENOUGH.items() if rows <= most)
    is_deep = group_size >= terms or group_size % DEEP == 0 or group_size < LEAST_DEPTH
    depth = DEEP if is_deep else LEAST_DEPTH
    piece = PIECE * 2 if nibbles else PIECE
    fitting = [t for t in TILES if fits(t, rows, terms, group_size, stepped) and depth == t.BLOCK_K]
    longest = max(t.unroll for t in fitting if t.unroll * depth <= max(depth, piece))
    fitting = [t for t in fitting if t.unroll == longest]

    def count_programs(tile: Tile) -> int:
        return tile.blocks(rows, columns) * tile.parts

    enough = [t for t in fitting if count_programs(t) >= least]
    # A wide block reads activations less often. Sums of more rows take so many registers that only
    # narrow blocks leave room for other programs. Parts of K are read again by what sums them.
    is_wide = rows <= MOST_WIDE
    best = sorted(enough, key=lambda t: (-t.BLOCK_N if is_wide else t.BLOCK_N, t.parts))
    return best[0] if best else max(fitting, key=count_programs)
