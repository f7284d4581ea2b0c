"""Lowerings of `ipex::column_moments` to a Triton template, `ipex::moments` to Inductor's loops."""

from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import lowerings, register_lowering

from ipex_inductor.lowerings.common.templated import dense, node, template
from ipex_inductor.templates.triton import moments

aten = torch.ops.aten


def _grid(columns: Any, slots: Any, meta: Any) -> tuple[Any, ...]:
    return meta["PARTS"] * meta["BLOCKS_C"], 1, 1


def _lower(x: Any, parts: int, tile: list[int]) -> Any:
    chosen, x = moments.Tile(*tile), dense(x)
    rows, columns = (int(size) for size in x.get_size())
    return node(
        template("ipex_moments", moments.SOURCE, _grid),
        [x],
        ir.FixedLayout(x.get_device(), torch.float32, [columns, 2 * parts + 1]),
        chosen.num_warps,
        chosen.num_stages,
        **moments.constants(rows, columns, parts, chosen),
    )


def _lower_moments(partial: Any, rows: int) -> tuple[Any, Any]:
    """Lower to Inductor's own loops, which it fuses with the per-channel ops that follow.

    The mean is written to memory beside the sums, as its shift is far apart in memory from channel
    to channel. The variance is not, though every pixel computes it: triton 3.6 does not compile a
    kernel that stores it and goes on with it ("operand #0 does not dominate this use").
    """
    parts = int(partial.get_size()[1]) // 2

    def mean_of(begin: int, end: int) -> Any:
        part = lowerings[aten.slice.Tensor](partial, 1, begin, end)
        return lowerings[aten.mul.Tensor](lowerings[aten.sum.dim_IntList](part, [1]), 1 / rows)

    offset, square = mean_of(0, parts), mean_of(parts, 2 * parts)
    variance = lowerings[aten.sub.Tensor](square, lowerings[aten.mul.Tensor](offset, offset))
    shift = lowerings[aten.select.int](partial, 1, 2 * parts)
    mean = lowerings[aten.add.Tensor](shift, offset)
    mean.realize()
    return lowerings[aten.clamp_min.default](variance, 0.0), mean


def register() -> None:
    """Add the lowerings to Inductor's registry."""
    register_lowering(torch.ops.ipex.column_moments.default, type_promotion_kind=None)(_lower)
    register_lowering(torch.ops.ipex.moments.default, type_promotion_kind=None)(_lower_moments)
