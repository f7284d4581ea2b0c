"""`ipex::winograd`: a convolution of 3 x 3 pixels by Winograd's way, on a weight that
`ipex::winograd_weight` transforms: by F(2 x 2, 3 x 3) in fp32, by F(4 x 4, 3 x 3) in bf16.
"""

import torch
from torch import Tensor

from ipex_inductor.ops import epilogue
from ipex_inductor.ops.defining import op
from ipex_inductor.runtime.huge_pages import on_huge_pages

PANEL = 16  # channels of the result that lie together
# Pixels of a side of a tile of the result. Larger ones save more products and lose more digits.
TILE = {torch.float32: 2, torch.bfloat16: 4}


@op("winograd_weight")
def winograd_weight(weight: Tensor) -> Tensor:
    """`transformed` as an op."""
    return transformed(weight)


def transformed(weight: Tensor) -> Tensor:
    """weight [O, C, 3, 3] as [O / 16, spots of a window, C, 16] in fp32, computed in fp64.

    O is a multiple of 16; of fp32 there are 16 spots, of bf16 36. (Lavin and Gray, "Fast Algorithms
    for Convolutional Neural Networks".)
    """
    result = on_huge_pages(weight, shape(weight), torch.float32)
    side = TILE[weight.dtype] + 2
    for panel, windows in zip(result, torch.split(weight, PANEL), strict=True):  # in the cache each
        spots = _spread(_spread(windows.permute(2, 3, 1, 0).double(), 0, side), 1, side)
        panel.copy_(spots.flatten(0, 1))
    return result


@winograd_weight.register_fake
def _(weight: Tensor) -> Tensor:
    return weight.new_empty(shape(weight), dtype=torch.float32)


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
    """`unary(binary(convolution(x, w, bias), other))`, the words of `ops/epilogue.py`, stride 1.

    x [B, C, H, W], other and the result [B, O, H', W'], all channels-last; weight as
    `ipex::winograd_weight` makes it of [O, C, 3, 3], bias [O]. Rounded once.
    """
    side = TILE[x.dtype] + 2
    spots = weight.permute(0, 3, 2, 1).reshape(-1, weight.shape[2], side, side)
    plain = _undone(_undone(spots, 2), 3)
    bias, other = (t if t is None else t.float() for t in (bias, other))
    product = torch.conv2d(x.float(), plain, bias, 1, padding)
    result = epilogue.apply(product, other, binary, unary, []).to(x.dtype)
    return result.contiguous(memory_format=torch.channels_last)


@winograd.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    other: Tensor | None,
    padding: list[int],
    binary: str,
    unary: str,
) -> Tensor:
    sides = [size + 2 * more - 2 for size, more in zip(x.shape[2:], padding, strict=True)]
    made = weight.shape[0] * PANEL
    return x.new_empty(x.shape[0], made, *sides).contiguous(memory_format=torch.channels_last)


def _spread(window: Tensor, dim: int, side: int) -> Tensor:
    first, middle, last = window.unbind(dim)
    if side == 4:
        both, middle = (first + last) / 2, middle / 2
        return torch.stack([first, both + middle, both - middle, last], dim)
    both, more = (first + last) / -6, (first + 4 * last) / 24
    spots = [first / 4, both - middle / 6, both + middle / 6]
    return torch.stack([*spots, more + middle / 12, more - middle / 12, last], dim)


def _undone(spots: Tensor, dim: int) -> Tensor:
    first, more, less, *_, last = spots.unbind(dim)
    if spots.shape[dim] == 4:
        return torch.stack([first, more - less, last], dim)
    return torch.stack([4 * first, 3 * (less - more), last], dim)


def shape(weight: Tensor) -> tuple[int, int, int, int]:
    """Of the transformed weight."""
    return weight.shape[0] // PANEL, (TILE[weight.dtype] + 2) ** 2, weight.shape[1], PANEL
