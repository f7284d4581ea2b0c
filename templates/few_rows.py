"""Products of few rows in Triton: limited by memory, so the weight is read once, at its speed.

A program has BLOCK_N rows of the weight and, of each, the part of `TERMS` terms that is its own.
What loads it waits for is hidden by as many bytes in flight: a GPU needs its bandwidth times its
latency of them, an H200 about 26 kB on each multiprocessor.
"""

from collections.abc import Iterator
from typing import NamedTuple

NAME = "ipex.few_rows"
MOST = 32  # rows: beyond, the product is no longer limited by memory alone
WIDE = 16  # rows of a tile of tensor cores: fewer are filled up with zeros


class Tile(NamedTuple):
    """How one program goes about it; `step` is how many bytes of a weight's row it loads at a time.

    `parts`: programs that share a row of the weight. `swapped`: the weight is the left
    factor, which Hopper's tensor cores read from shared memory as it is (from 64 rows on).
    """

    columns: int
    step: int
    parts: int
    warps: int
    stages: int
    swapped: bool = False

    def terms(self, size: int, itemsize: int) -> int:
        """How many of `size` terms one program adds up: whole steps."""
        step = self.step // itemsize
        return -(-size // (self.parts * step)) * step

    def parameters(self, rows: int, size: int, itemsize: int) -> dict[str, int | bool]:
        """The constants of a kernel for x [rows, size] of so many bytes an element."""
        block = 1 if rows == 1 else WIDE if rows <= WIDE else MOST
        return {
            "BLOCK_M": block,
            "BLOCK_N": self.columns,
            "BLOCK_K": self.step // itemsize,
            "TERMS": self.terms(size, itemsize),
            "STAGES": self.stages,
            "SWAPPED": bool(self.swapped),
        }

    def shared(self, rows: int, itemsize: int) -> int:
        """Bytes of shared memory, at most: its stages of x and the weight, or a sum over warps."""
        block = self.parameters(rows, 1, itemsize)["BLOCK_M"]
        return (block + self.columns) * self.step * self.stages * (self.stages > 1) + (1 << 12)


# One row is multiplied and summed without tensor cores: four or eight loads of 16 bytes a thread
# are in flight, or, with stages, those that wait in shared memory.
ONE_ROW = (
    Tile(1, 4096, 1, 4, 1),
    Tile(4, 2048, 1, 4, 1),
    Tile(8, 1024, 1, 4, 1),
    Tile(8, 2048, 1, 4, 1),
    Tile(16, 512, 1, 4, 1),
    Tile(16, 512, 1, 4, 4),
)
ROWS = (
    Tile(16, 512, 1, 2, 5),
    Tile(32, 512, 1, 4, 4),
    Tile(64, 256, 1, 4, 5),
    Tile(64, 256, 1, 4, 5, True),
)
NOT_XE = (*ONE_ROW[2:4], ROWS[3])  # for Intel's GPUs: two spill there, one is Hopper's
PARTS = (1, 2, 4, 8)


def tiles(one_row: bool) -> Iterator[Tile]:
    """Those for one row, or for more, each with every number of parts."""
    for parts in PARTS:
        for t in ONE_ROW if one_row else ROWS:
            yield t._replace(parts=parts)


# `{names}` are filled in by `inductor_source` and `source`. The rows of the weight beyond the last
# are the last again, so that no load of it has a mask; those of x beyond the last are not loaded.
_BEGIN = """\
    part = tl.program_id(1)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    weight_ = {weight} + tl.minimum(columns, N - 1).to(tl.int64)[:, None] * {weight_stride}
    EVEN: tl.constexpr = K % TERMS == 0
"""
_ONE_ROW = """\
    sums = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for step in tl.range(0, TERMS // BLOCK_K, num_stages=STAGES):
        k = part * TERMS + step * BLOCK_K + tl.arange(0, BLOCK_K)
        if EVEN:
            a = tl.load({x} + k * {x_step})
            b = tl.load(weight_ + k[None, :], eviction_policy="evict_first")
        else:
            a = tl.load({x} + k * {x_step}, mask=k < K, other=0)
            b = tl.load(weight_ + k[None, :], mask=(k < K)[None, :], other=0)
        sums += b.to(tl.float32) * a.to(tl.float32)[None, :]
    result = tl.sum(sums, 1)[None, :]
"""
_FEW_ROWS = """\
    rows = tl.arange(0, BLOCK_M).to(tl.int64)
    there = (rows < M)[:, None]
    x_ = {x} + rows[:, None] * {x_stride}  # rows may lie far apart
    sums = tl.zeros([BLOCK_N if SWAPPED else BLOCK_M, BLOCK_M if SWAPPED else BLOCK_N], tl.float32)
    for step in tl.range(0, TERMS // BLOCK_K, num_stages=STAGES):
        k = part * TERMS + step * BLOCK_K + tl.arange(0, BLOCK_K)
        if EVEN:
            a = tl.load(x_ + k[None, :] * {x_step}, mask=there, other=0)
            b = tl.load(weight_ + k[None, :])
        else:
            a = tl.load(x_ + k[None, :] * {x_step}, mask=there & (k < K)[None, :], other=0)
            b = tl.load(weight_ + k[None, :], mask=(k < K)[None, :], other=0)
        if SWAPPED:
            sums = tl.dot(b, tl.trans(a), sums, input_precision="ieee")
        else:
            sums = tl.dot(a, tl.trans(b), sums, input_precision="ieee")
    result = tl.trans(sums) if SWAPPED else sums
"""
_END = """\
    inside = (tl.arange(0, BLOCK_M) < M)[:, None] & (columns < N)[None, :]
    row = (part * M + tl.arange(0, BLOCK_M))[:, None]
    column = columns[None, :]
"""


def _body(one_row: bool, **names: str) -> str:
    return (_BEGIN + (_ONE_ROW if one_row else _FEW_ROWS) + _END).format(**names)


def inductor_source(one_row: bool) -> str:
    """A template of Inductor's, which puts an epilogue behind it: x [M, K], weight [N, K]."""
    sizes = {"M": ("X", 0), "N": ("W", 0), "K": ("X", 1)}
    head = '{{def_kernel("X", "W")}}\n' + "".join(
        f'    {size}: tl.constexpr = {{{{size("{name}", {at})}}}}\n'
        for size, (name, at) in sizes.items()
    )
    body = _body(
        one_row,
        x="X",
        weight="W",
        x_stride='{{stride("X", 0)}}',
        x_step='{{stride("X", 1)}}',
        weight_stride='{{stride("W", 0)}}',
    )
    shape = 'val_shape=("BLOCK_M", "BLOCK_N")'
    return f'{head}{body}    {{{{store_output(("row", "column"), "result", "inside", {shape})}}}}\n'


def source(one_row: bool) -> str:
    """A module with the kernel `product`: x [M, K], weight [N, K] to fp32 [parts, M, N]."""
    strides = ("x_stride", "x_step", "weight_stride")
    tile = Tile(1, 1, 1, 1, 1).parameters(1, 1, 1)
    typed = ", ".join(f"{name}: tl.constexpr" for name in ("M", "N", "K", *strides, *tile))
    body = _body(one_row, x="x", weight="weight", **{name: name for name in strides})
    return (
        "import triton\nimport triton.language as tl\n\n\n@triton.jit\n"
        f"def product(x, weight, y, {typed}):\n{body}"
        "    tl.store(y + row.to(tl.int64) * N + column, result, mask=inside)\n"
    )
