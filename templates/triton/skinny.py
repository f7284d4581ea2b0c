"""Skinny GEMMs in Triton: limited by memory, so the weight is read once, at the memory's speed.

A program has BLOCK_N rows of the weight and, of each, its part of `TERMS` of K. The latency of its
loads is hidden by bytes in flight: a GPU needs as many as its bandwidth times its latency, an H200
about 26 kB on each multiprocessor.
"""

from collections.abc import Iterator
from typing import NamedTuple

from ipex_inductor.templates.kernel_text import fill_values, read_kernel_text

NAME = "ipex.few_rows"
MOST = 32  # rows: beyond, the GEMM is no longer limited by memory alone
WIDE = 16  # rows of a tile of tensor cores: fewer are filled up with zeros


class Tile(NamedTuple):
    """The work of one program; `step` is the bytes of a weight's row that it loads at a time.

    `parts`: programs that share a row of the weight. `swapped`: the weight is the left factor,
    which Hopper's tensor cores read from shared memory as it is (from 64 rows on). `joined`: of two
    parts, the one that ends last adds the other's sums to its own, so that one kernel is enough.
    """

    columns: int
    step: int
    parts: int
    warps: int
    stages: int
    swapped: bool = False
    joined: bool = False

    def fields(self) -> dict[str, int | bool]:
        """Return the fields as in records, with `joined` only if it is true."""
        return {k: v for k, v in self._asdict().items() if v or k != "joined"}

    def terms(self, size: int, itemsize: int) -> int:
        """Return how much of a K of `size` a program adds up: whole steps."""
        step = self.step // itemsize
        return -(-size // (self.parts * step)) * step

    def parameters(self, rows: int, size: int, itemsize: int) -> dict[str, int | bool]:
        """Return the constants of a kernel for x [rows, size] of `itemsize` bytes an element."""
        block = 1 if rows == 1 else WIDE if rows <= WIDE else MOST
        return {
            "BLOCK_M": block,
            "BLOCK_N": self.columns,
            "BLOCK_K": self.step // itemsize,
            "TERMS": self.terms(size, itemsize),
            "STAGES": self.stages,
            "SWAPPED": bool(self.swapped),
        }

    def blocks(self, columns: int) -> int:
        """Return the number of programs that share no row of the weight."""
        return -(-columns // self.columns)

    def workspace(self, rows: int, columns: int) -> int:
        """Return the bytes for `joined` parts: a word and the sums of each part, a block."""
        block = self.parameters(rows, 1, 1)["BLOCK_M"]
        return self.blocks(columns) * (WORD + self.parts * 4 * block * self.columns)

    def shared(self, rows: int, itemsize: int) -> int:
        """Return the bytes of shared memory, at most: stages of x and weight, or a warp sum."""
        block = self.parameters(rows, 1, itemsize)["BLOCK_M"]
        return (block + self.columns) * self.step * self.stages * (self.stages > 1) + (1 << 12)


USUAL = Tile(1, 1, 1, 1, 1)  # the default: not joined

# One row is multiplied and summed without tensor cores: four or eight loads of 16 bytes a thread
# are in flight; with stages, loads wait in shared memory instead.
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
NOT_XE = (*ONE_ROW[2:4], ROWS[3])  # not for Intel GPUs: two spill there, one is for Hopper
PARTS = (1, 2, 4, 8)
# Two parts that become one result in the same kernel.
JOINED = tuple(t._replace(parts=2, joined=True) for t in ROWS[2:])
WORD = 16  # bytes, of which eight mark a stored part


def tiles(one_row: bool) -> Iterator[Tile]:
    """Yield the tiles for one row, or for more, with each number of parts; then joined ones."""
    base_tiles = ONE_ROW if one_row else ROWS
    for parts in PARTS:
        for t in base_tiles:
            yield t._replace(parts=parts)
    yield from () if one_row else JOINED


# Rows of the weight beyond the last are the last one again, so that its loads need no mask; rows of
# x beyond the last are not loaded. Of `joined` parts, each stores its sums and exchanges the word,
# which is HERE if the other part came first. The word is not initialised: unwritten memory holds
# these 64 bits by chance as rarely as two 64-bit digests collide, and the last part resets them.
# Addition of two terms is commutative, so no result depends on which part was last.
def _body(one_row: bool, how: Tile, **names: str) -> str:
    rows = "triton/skinny_one_row.py.jinja" if one_row else "triton/skinny_few_rows.py.jinja"
    end = "triton/skinny_joined.py.jinja" if how.joined else "triton/skinny_parts.py.jinja"
    return fill_values(read_kernel_text(rows) + read_kernel_text(end), **names)


def inductor_source(one_row: bool, how: Tile = USUAL) -> str:
    """Return a template for Inductor, which adds an epilogue: x [M, K], weight [N, K].

    Of `how` only the properties are used that are no constants of the kernel.
    """
    sizes = {"M": ("X", 0), "N": ("W", 0), "K": ("X", 1)}
    head = '{{def_kernel("X", "W")}}\n' + "".join(
        f'    {size}: tl.constexpr = {{{{size("{name}", {at})}}}}\n'
        for size, (name, at) in sizes.items()
    )
    body = _body(
        one_row,
        how,
        x="X",
        weight="W",
        x_stride='{{stride("X", 0)}}',
        x_step='{{stride("X", 1)}}',
        weight_stride='{{stride("W", 0)}}',
        workspace="ws_ptr",
    )
    indent = 8 if how.joined else 4
    more = f'val_shape=("BLOCK_M", "BLOCK_N"){", indent_width=8" * how.joined}'
    store = f'{{{{store_output(("row", "column"), "result", "inside", {more})}}}}'
    return f"{head}{body}{' ' * indent}{store}\n"


def source(one_row: bool, how: Tile = USUAL) -> str:
    """Return a module with the kernel `product`: x [M, K], weight [N, K] to fp32 [parts, M, N].

    A `joined` kernel writes one part, and takes a workspace after y.
    """
    strides = ("x_stride", "x_step", "weight_stride")
    tile = USUAL.parameters(1, 1, 1)
    typed = ", ".join(f"{name}: tl.constexpr" for name in ("M", "N", "K", *strides, *tile))
    names = {name: name for name in strides}
    body = _body(one_row, how, x="x", weight="weight", workspace="work", **names)
    return (
        "import triton\nimport triton.language as tl\n\n\n@triton.jit\n"
        f"def product(x, weight, y, {'work, ' * how.joined}{typed}):\n{body}"
        f"{' ' * (8 if how.joined else 4)}"
        "tl.store(y + row.to(tl.int64) * N + column, result, mask=inside)\n"
    )
