"""The backward of a max pool as a template of ours (`templates/pool.py`)."""

from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import register_lowering

from ipex_inductor.lowerings.conv_templates import in_blocks, ints
from ipex_inductor.lowerings.templated import dense, node, template
from ipex_inductor.templates import pool

STAGES = 2  # there is no loop in it


def _lower_backward(
    grad: Any,
    offsets: Any,
    image: list[int],
    window: list[int],
    stride: list[int],
    padding: list[int],
) -> Any:
    grad, offsets = dense(grad, last=True), dense(offsets, last=True)
    batch, channels, *pooled = ints(grad.get_size())
    tile = pool.tile_for(channels)
    around = window, stride, padding
    constants = pool.constants(batch, (channels, *image), pooled, *around, tile)
    size = [constants["PIXELS"], channels]
    result = ir.FixedLayout(grad.get_device(), grad.get_dtype(), size)
    known = template("ipex_max_pool_backward", pool.SOURCE, in_blocks)
    return node(known, (grad, offsets), result, tile.num_warps, STAGES, **constants)


def register() -> None:
    """Add the lowering to Inductor's registry."""
    backward = torch.ops.ipex.max_pool_backward.default
    register_lowering(backward, type_promotion_kind=None)(_lower_backward)
