"""A single pass over gradients in Triton: sums of squares, and a check that all are finite."""

import functools
from textwrap import indent

from ipex_inductor.templates.kernel_text import fill_macro
from ipex_inductor.templates.optimizer.step import StepKernel
from ipex_inductor.templates.optimizer.step_triton import (
    TYPES,
    scalars_of,
    scalars_signature,
    words,
)

_fill = functools.partial(fill_macro, "optimizer/norm_triton.py.jinja")
_LOOK = "    wrong = tl.where(tl.abs(grad) < float('inf'), wrong, 1)\n"  # nor is NaN
_SQUARE = "    squares += (grad * times) * (grad * times)\n"
_WRONG = "    tl.store(counters + 1, 1, mask=tl.max(wrong) != 0)\n"  # each writes the same
_SUM = "    tl.store(sums + before + chunk, tl.sum(squares).to(tl.float64))\n"
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

    def turn(mask: str, masked: str) -> str:
        load = _fill("turn", mask=mask, masked=masked, real=precision)
        return indent(load + _LOOK * looks + _SQUARE * squares, " " * 8).rstrip()

    inside = "inside = begin + BLOCK * turn + tl.arange(0, BLOCK) < size\n    "
    last = _fill("write_found") if looks else _fill("read_found")
    if squares:
        last += _fill("total", real=_real(real))
    if kernel is not None:
        last += _fill("scalars", **_ROW)
    parts = _fill(
        "parts",
        arguments=", ".join(parts_signature(real, squares, kernel)),
        type=TYPES[grad],
        real=precision,
        whole=turn("", ""),
        partly=turn(inside, ", mask=inside, other=0"),
        stores=_WRONG * looks + _SUM * squares,
        last=indent(last, " " * 8).rstrip(),
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
