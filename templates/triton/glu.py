"""Triton template of a GLU (a gated pair of GEMMs) with a large K, by persistent programs.

As in `templates/triton/persistent.py`, but a block of rows is multiplied by both weights as it is
loaded, and one block is written: the activation of one GEMM, times the other.
"""

from dataclasses import dataclass
from typing import Any

from ipex_inductor.ops.pointwise.gelu import CLAMP, MILLS
from ipex_inductor.templates.triton import persistent

NAME = "ipex.triton.gated"

# Rendered with Inductor's hooks, or with the hooks of a caller that renders it alone.
# Activations are those of `ops/pointwise/gelu.py`.
SOURCE = """\
{%- if BIASED %}{{def_kernel("X", "G", "W", "GATE_BIAS", "BIAS")}}
{%- else %}{{def_kernel("X", "G", "W")}}{% endif %}
    given = tl.make_tensor_descriptor(X, [ROWS, TERMS], [TERMS, 1], [BLOCK_M, BLOCK_K])
    gates = tl.make_tensor_descriptor(G, [COLUMNS, TERMS], [TERMS, 1], [BLOCK_N, BLOCK_K])
    weights = tl.make_tensor_descriptor(W, [COLUMNS, TERMS], [TERMS, 1], [BLOCK_N, BLOCK_K])
    for block in tl.range(tl.program_id(0), BLOCKS_M * BLOCKS_N, PROGRAMS, flatten=True):
        # Neighbours share rows and columns, which the cache then has.
        within = block % (GROUP_M * BLOCKS_N)
        above = block // (GROUP_M * BLOCKS_N) * GROUP_M
        high = tl.minimum(BLOCKS_M - above, GROUP_M)
        top = (above + within % high) * BLOCK_M
        left = within // high * BLOCK_N
        gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in tl.range(0, TERMS, BLOCK_K, num_stages=STAGES):
            rows = given.load([top, k])
            gate = tl.dot(rows, gates.load([left, k]).T, gate, allow_tf32=ALLOW_TF32)
            acc = tl.dot(rows, weights.load([left, k]).T, acc, allow_tf32=ALLOW_TF32)
        row = tl.arange(0, BLOCK_M).to(INDEX_DTYPE) + top
        column = tl.arange(0, BLOCK_N) + left
{%- if BIASED %}
{%- set there = ", mask=column < COLUMNS, other=0.0" if COLUMNS % BLOCK_N %}
        gate += tl.load(GATE_BIAS + column{{there}}).to(tl.float32)[None, :]
        acc += tl.load(BIAS + column{{there}}).to(tl.float32)[None, :]
{%- endif %}
{%- if SILU %}
        opened = gate / (1.0 + tl.exp2(gate * -1.4426950408889634))
{%- elif TANH %}
        exponent = gate * (-2.302208198144325 - 0.1029432395800235 * (gate * gate))
        opened = gate / (1.0 + tl.exp2(exponent))
{%- else %}
        size = tl.abs(gate)
        near = tl.minimum(size, CLAMP)
        ratio = near * HIGHEST + SECOND
REST
        below = near * ratio * tl.exp2(gate * (gate * -0.7213475204444817))
        opened = 0.5 * gate + 0.5 * size - below
{%- endif %}
        made = opened * acc
        idx_m = row[:, None]
        idx_n = column[None, :]
        mask = (row < ROWS)[:, None]{{" & (column < COLUMNS)[None, :]" if COLUMNS % BLOCK_N}}
{%- set shape = ("BLOCK_M", "BLOCK_N") %}
        {{store_output(("idx_m", "idx_n"), "made", "mask", val_shape=shape, indent_width=8)}}
"""
_HIGHEST, _SECOND, *_REST = MILLS
_NUMBERS = {"CLAMP": f"{CLAMP}", "HIGHEST": f"{_HIGHEST}", "SECOND": f"{_SECOND}"}
_NUMBERS["REST"] = "\n".join(f"        ratio = ratio * near + {factor}" for factor in _REST)
for _name, _number in _NUMBERS.items():
    SOURCE = SOURCE.replace(_name, _number)
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
