"""A single pass over gradients in Triton: sums of squares, and a check that all are finite."""

from textwrap import indent

from ipex_inductor.templates.optimizer.step import StepKernel
from ipex_inductor.templates.optimizer.step_triton import (
    TYPES,
    scalars_of,
    scalars_signature,
    words,
)

_PARTS = '''\
@triton.jit
def parts(
    {arguments},
    ALIGNED: tl.constexpr, BLOCK: tl.constexpr, TURNS: tl.constexpr, ROWS: tl.constexpr,
):
    """A program is a chunk: a row (an address, a size), and which TURNS blocks of it.

    Of `count` programs in all launches the last one draws the conclusions; `before` this launch
    there were some. Gradients are to be taken over what `divisor` points to, if it is not 0, and
    are judged before.
    """
    chunk = tl.program_id(0).to(tl.int64)
    number = tl.load(chunks + 2 * chunk).to(tl.int64)
    begin = BLOCK * TURNS * tl.load(chunks + 2 * chunk + 1).to(tl.int64)
    size = tl.load(rows + 2 * number + 1)
    grad_ = tl.load(rows + 2 * number).to(tl.pointer_type({type}))
    grad_ = tl.multiple_of(grad_, ALIGNED) + begin + tl.arange(0, BLOCK)
    scale = tl.full([], 1.0, tl.float64)
    if divisor != 0:
        scale = 1.0 / tl.load(divisor.to(tl.pointer_type(tl.float32))).to(tl.float64)
    times = scale.to({real})
    squares = tl.zeros([BLOCK], {real})
    wrong = tl.zeros([BLOCK], tl.int32)
    if begin + BLOCK * TURNS <= size:
{whole}
    else:
{partly}
{stores}\
    tl.debug_barrier()
    if tl.atomic_add(counters, 1, sem="acq_rel") == count - 1:
        tl.store(counters, 0)
{last}'''
_TURN = """\
for turn in tl.static_range(TURNS):
    {mask}grad = tl.load(grad_ + BLOCK * turn{masked}).to({real})
"""
_LOOK = "    wrong = tl.where(tl.abs(grad) < float('inf'), wrong, 1)\n"  # nor is NaN
_SQUARE = "    squares += (grad * times) * (grad * times)\n"
_WRONG = "    tl.store(counters + 1, 1, mask=tl.max(wrong) != 0)\n"  # each writes the same
_SUM = "    tl.store(sums + before + chunk, tl.sum(squares).to(tl.float64))\n"
# What others wrote is not in this processor's own cache; a counter is 0 for the next launch.
_FOUND = """\
left = tl.atomic_xchg(counters + 1, 0, sem="acq_rel").to(tl.float32)
tl.store(found_inf.to(tl.pointer_type(tl.float32)), left)
"""
_TOLD = """\
left = 0.0
if found_inf != 0:
    left = tl.load(found_inf.to(tl.pointer_type(tl.float32)))
"""
_TOTAL = """\
index = tl.arange(0, BLOCK)
total = tl.zeros([BLOCK], tl.float64)
for at in range(0, count, BLOCK):
    part = sums + at + index
    total += tl.load(part, mask=at + index < count, other=0, cache_modifier=".cg")
found = tl.sqrt(tl.sum(total)).to({real})
tl.store(norm, found)
clips = clip / (found.to(tl.float64) + 1e-6)
clips = tl.where(clips > 1, 1.0, clips)
tl.store(factor, clips)
scale = scale * clips
"""
_SCALARS = """\
for at in range(0, {count}, ROWS):
    scalars_of(at, {rows}, {count}, numbers, rates, scale, left, table, ROWS)
"""
_ROW = {"rows": "steps", "count": "stepped"}  # names in `parts` of the arguments of `scalars`


def parts_source(
    grad: str, real: str, squares: bool, looks: bool, kernel: StepKernel | None = None
) -> str:
    """Return a module with the kernel `parts`, for gradients of a dtype.

    Args:
        grad: the gradients' dtype.
        real: the dtype of the norm.
        squares: whether the kernel writes the norm, and the factor that clips it to `clip`.
        looks: whether it writes to `found_inf` if a gradient is not finite; else it may read that.
        kernel: a step whose `scalars` the kernel computes as well, or None.
    """
    precision = _real(grad)
    turn = _TURN + _LOOK * looks + _SQUARE * squares

    def lines(mask: str, masked: str) -> str:
        return indent(turn.format(mask=mask, masked=masked, real=precision), " " * 8).rstrip()

    inside = "inside = begin + BLOCK * turn + tl.arange(0, BLOCK) < size\n    "
    last = _FOUND if looks else _TOLD
    if squares:
        last += _TOTAL.format(real=_real(real))
    if kernel is not None:
        last += _SCALARS.format(**_ROW)
    parts = _PARTS.format(
        arguments=", ".join(parts_signature(real, squares, kernel)),
        type=TYPES[grad],
        real=precision,
        whole=lines("", ""),
        partly=lines(inside, ", mask=inside, other=0"),
        stores=_WRONG * looks + _SUM * squares,
        last=indent(last, " " * 8),
    )
    called = "" if kernel is None else scalars_of(kernel) + "\n\n"
    return words(coarse=False) + called + parts


def parts_signature(real: str, squares: bool, kernel: StepKernel | None = None) -> dict[str, str]:
    """Return Triton's types of the arguments of `parts`."""
    types = {"rows": "*i64", "chunks": "*i32", "sums": "*fp64", "counters": "*i32"}
    types |= {"before": "i32", "count": "i32", "divisor": "i64", "found_inf": "i64"}
    if squares:
        types |= {"clip": "fp64", "norm": f"*{_real(real)}".replace("tl.float", "fp")}
        types["factor"] = "*fp64"
    if kernel is not None:
        scalar_types = scalars_signature(kernel)
        types |= {
            _ROW.get(n, n): scalar_types[n] for n in ("rows", "count", "numbers", "rates", "table")
        }
    return types


def _real(grad: str) -> str:
    return TYPES["float64" if grad == "float64" else "float32"]
