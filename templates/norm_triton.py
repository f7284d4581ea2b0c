"""One reading of gradients in Triton: sums of their squares, and whether one is not finite."""

from textwrap import indent

from ipex_inductor.templates.step_triton import TYPES

_PARTS = '''\
import triton
import triton.language as tl


@triton.jit
def parts(
    rows, chunks, sums, divisor, found_inf,
    ALIGNED: tl.constexpr, BLOCK: tl.constexpr, TURNS: tl.constexpr,
):
    """A program is a chunk: a row (an address, a size), and which TURNS blocks of it.

    Gradients are to be taken over what `divisor` points to, if it is not 0, and are judged before.
    """
    chunk = tl.program_id(0).to(tl.int64)
    number = tl.load(chunks + 2 * chunk).to(tl.int64)
    begin = BLOCK * TURNS * tl.load(chunks + 2 * chunk + 1).to(tl.int64)
    size = tl.load(rows + 2 * number + 1)
    grad_ = tl.load(rows + 2 * number).to(tl.pointer_type({type}))
    grad_ = tl.multiple_of(grad_, ALIGNED) + begin + tl.arange(0, BLOCK)
    times = tl.full([], 1.0, {real})
    if divisor != 0:
        scale = tl.load(divisor.to(tl.pointer_type(tl.float32)))
        times = (1.0 / scale.to(tl.float64)).to({real})
    squares = tl.zeros([BLOCK], {real})
    wrong = tl.zeros([BLOCK], tl.int32)
    if begin + BLOCK * TURNS <= size:
{whole}
    else:
{partly}
{stores}'''
_TURN = """\
for turn in tl.static_range(TURNS):
    {mask}grad = tl.load(grad_ + BLOCK * turn{masked}).to({real})
"""
_LOOK = "    wrong = tl.where(tl.abs(grad) < float('inf'), wrong, 1)\n"  # nor is NaN
_SQUARE = "    squares += (grad * times) * (grad * times)\n"
_FOUND = "    tl.store(found_inf, 1.0, mask=tl.max(wrong) != 0)\n"  # each writes the same
_SUM = "    tl.store(sums + chunk, tl.sum(squares).to(tl.float64))\n"
_TOTAL = '''

@triton.jit
def total(sums, count, clip, norm, factor, BLOCK: tl.constexpr):
    """One program adds up all chunks, in their order: the norm, and what clips it to `clip`."""
    index = tl.arange(0, BLOCK)
    squares = tl.zeros([BLOCK], tl.float64)
    for begin in range(0, count, BLOCK):
        squares += tl.load(sums + begin + index, mask=begin + index < count, other=0)
    found = tl.sqrt(tl.sum(squares)).to({real})
    tl.store(norm, found)
    times = clip / (found.to(tl.float64) + 1e-6)
    tl.store(factor, tl.where(times > 1, 1.0, times))
'''
PARTS = {
    "rows": "*i64",
    "chunks": "*i32",
    "sums": "*fp64",
    "divisor": "i64",
    "found_inf": "*fp32",
}


def parts_source(grad: str, squares: bool, looks: bool) -> str:
    """A module with the kernel `parts`, for gradients of that dtype.

    `squares`: it writes a sum for each chunk. `looks`: it writes 1 where one is not finite.
    """
    real = _real(grad)
    turn = _TURN + _LOOK * looks + _SQUARE * squares

    def lines(mask: str, masked: str) -> str:
        return indent(turn.format(mask=mask, masked=masked, real=real), " " * 8).rstrip()

    inside = "inside = begin + BLOCK * turn + tl.arange(0, BLOCK) < size\n    "
    return _PARTS.format(
        type=TYPES[grad],
        real=real,
        whole=lines("", ""),
        partly=lines(inside, ", mask=inside, other=0"),
        stores=_FOUND * looks + _SUM * squares,
    )


def total_source(grad: str) -> str:
    """A module with the kernel `total`, of norms in the precision of such gradients' arithmetic."""
    return "import triton\nimport triton.language as tl\n" + _TOTAL.format(real=_real(grad))


def total_signature(grad: str) -> dict[str, str]:
    """Triton's types of the arguments of `total`."""
    real = "fp64" if grad == "float64" else "fp32"
    numbers = {"sums": "*fp64", "count": "i32", "clip": "fp64"}
    return {**numbers, "norm": f"*{real}", "factor": "*fp64"}


def _real(grad: str) -> str:
    return TYPES["float64" if grad == "float64" else "float32"]
