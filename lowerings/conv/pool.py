"""Lowerings of max pools in training to our templates (`templates/triton/pool.py`)."""

from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import empty_strided, register_lowering

from ipex_inductor.lowerings.common.conv_templates import in_blocks, ints
from ipex_inductor.lowerings.common.registering import register_by_name
from ipex_inductor.lowerings.common.templated import dense, node, template
from ipex_inductor.ops.common.defining import Arguments
from ipex_inductor.ops.conv.geometry import sides
from ipex_inductor.templates.triton import pool

STAGES = 2  # The kernels have no loop to pipeline.


def _lower_forward(call: Arguments) -> list[Any]:
    x = dense(call.x, last=True)
    batch, *image = ints(x.get_size())
    geometry = call.window, call.stride, call.padding
    pooled = sides(image[1:], *geometry)
    tile = pool.tile_for(image[0])
    constants = pool.constants(batch, image, pooled, *geometry, tile)
    size = [constants["PIXELS"], image[0]]
    offsets = empty_strided(size, None, dtype=torch.int8, device=x.get_device())
    offsets.realize()
    result = ir.FixedLayout(x.get_device(), x.get_dtype(), size)
    pool_template = template("ipex_norm_relu_pool", pool.FORWARD, in_blocks)
    inputs = (x, *map(dense, (call.mean, call.rstd, call.weight, call.bias)), offsets)
    pooled_rows = node(
        pool_template, inputs, result, tile.num_warps, STAGES, written=[offsets], **constants
    )
    return [pooled_rows, offsets]


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
    geometry = window, stride, padding
    constants = pool.constants(batch, (channels, *image), pooled, *geometry, tile)
    size = [batch * image[0] * image[1], channels]
    result = ir.FixedLayout(grad.get_device(), grad.get_dtype(), size)
    pool_template = template("ipex_max_pool_backward", pool.BACKWARD, _steps)
    return node(pool_template, (grad, offsets), result, tile.num_warps, STAGES, **constants)


def _steps(rows: Any, columns: Any, meta: Any, *, cdiv: Any) -> tuple[Any, ...]:
    return cdiv(meta["STEPS"], meta["BLOCK_M"]), cdiv(columns, meta["BLOCK_N"]), 1


def register() -> None:
    """Add the lowerings to Inductor's registry."""
    forward = torch.ops.ipex.norm_relu_pool.default
    backward = torch.ops.ipex.max_pool_backward.default
    register_by_name(forward, _lower_forward)
    register_lowering(backward, type_promotion_kind=None)(_lower_backward)
