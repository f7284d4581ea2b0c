"""`ipex::winograd`: a 3 x 3 Winograd convolution on a transformed weight.

`ipex::winograd_weight` transforms the weight: for F(2 x 2, 3 x 3) in fp32, F(4 x 4, 3 x 3) in bf16.
"""

import torch
from torch import Tensor

from ipex_inductor.ops.common import epilogue
from ipex_inductor.ops.common.defining import Arguments, fake, op
from ipex_inductor.runtime.huge_pages import on_huge_pages

PANEL = 16  # adjacent output channels of a panel
# Side of an output tile, in pixels. Larger tiles save more multiplications and lose more digits.
TILE = {torch.float32: 2, torch.bfloat16: 4}


@op("winograd_weight")
def winograd_weight(weight: Tensor) -> Tensor:
    """Return the transformed weight: `transform_weight` as an op."""
    return transform_weight(weight)


def transform_weight(weight: Tensor) -> Tensor:
    """Return weight [O, C, 3, 3] as [O / 16, points, C, 16] in fp32, computed in fp64.

    O is a multiple of 16; there are 16 points for fp32, 36 for bf16. (Lavin and Gray, "Fast
    Algorithms for Convolutional Neural Networks".)
    """
    result = on_huge_pages(weight, transformed_shape(weight), torch.float32)
    side = TILE[weight.dtype] + 2
    # One panel at a time fits the cache.
    for panel, windows in zip(result, torch.split(weight, PANEL), strict=True):
        spots = _transform(_transform(windows.permute(2, 3, 1, 0).double(), 0, side), 1, side)
        panel.copy_(spots.flatten(0, 1))
    return result


@winograd_weight.register_fake
def _(weight: Tensor) -> Tensor:
    return weight.new_empty(transformed_shape(weight), dtype=torch.float32)


@op("winograd")
def winograd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    other: Tensor | None,
    padding: list[int],
    binary: str,
    unary: str,
) -> Tensor:
    """Return `unary(binary(convolution(x, w, bias), other))` with stride 1, rounded once.

    Args:
        x: [B, C, H, W] in channels-last.
        weight: [O, C, 3, 3] as `ipex::winograd_weight` transforms it.
        bias: [O].
        other: as the result.
        padding: of each dimension.
        binary: name in `ops/common/epilogue.py`.
        unary: name in `ops/common/epilogue.py`.

    Returns:
        [B, O, H', W'] in channels-last.
    """
    side = TILE[x.dtype] + 2
    spots = weight.permute(0, 3, 2, 1).reshape(-1, weight.shape[2], side, side)
    plain = _invert(_invert(spots, 2), 3)
    bias, other = (t if t is None else t.float() for t in (bias, other))
    product = torch.conv2d(x.float(), plain, bias, 1, padding)
    result = epilogue.apply(product, other, binary, unary, []).to(x.dtype)
    return result.contiguous(memory_format=torch.channels_last)


@fake(winograd)
def _(call: Arguments) -> object:
    sides = [size + 2 * more - 2 for size, more in zip(call.x.shape[2:], call.padding, strict=True)]
    channels = call.weight.shape[0] * PANEL
    return call.x.new_empty(call.x.shape[0], channels, *sides).contiguous(
        memory_format=torch.channels_last
    )


def _transform(window: Tensor, dim: int, side: int) -> Tensor:
    """Transform one dimension of a 3 x 3 kernel to `side` points."""
    first, middle, last = window.unbind(dim)
    if side == 4:
        both, middle = (first + last) / 2, middle / 2
        return torch.stack([first, both + middle, both - middle, last], dim)
    both, more = (first + last) / -6, (first + 4 * last) / 24
    spots = [first / 4, both - middle / 6, both + middle / 6]
    return torch.stack([*spots, more + middle / 12, more - middle / 12, last], dim)


def _invert(spots: Tensor, dim: int) -> Tensor:
    """Return the 3 taps of a transformed dimension: the inverse of `_transform`."""
    first, more, less, *_, last = spots.unbind(dim)
    if spots.shape[dim] == 4:
        return torch.stack([first, more - less, last], dim)
    return torch.stack([4 * first, 3 * (less - more), last], dim)


def transformed_shape(weight: Tensor) -> tuple[int, int, int, int]:
    """Return the shape of the transformed weight."""
    return weight.shape[0] // PANEL, (TILE[weight.dtype] + 2) ** 2, weight.shape[1], PANEL
