"""`ipex::winograd`: a convolution of 3 x 3 pixels by Winograd's F(2 x 2, 3 x 3), on a weight that
`ipex::winograd_weight` transforms.
"""

import torch
from torch import Tensor

from ipex_inductor.ops import epilogue
from ipex_inductor.ops.blocked import on_huge_pages
from ipex_inductor.ops.defining import op

PANEL = 16  # channels of the result that lie together
SPOTS = 16  # of a transformed window


@op("winograd_weight")
def winograd_weight(weight: Tensor) -> Tensor:
    """`transformed` as an op."""
    return transformed(weight)


def transformed(weight: Tensor) -> Tensor:
    """weight [O, C, 3, 3] as [O / 16, 16 spots of a window, C, 16], computed in fp64.

    O is a multiple of 16. (Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks".)
    """
    result = on_huge_pages(weight, _shape(weight))
    for panel, windows in zip(result, torch.split(weight, PANEL), strict=True):  # in the cache each
        spots = _spread(_spread(windows.permute(2, 3, 1, 0).double(), 0), 1)
        panel.copy_(spots.flatten(0, 1))
    return result


@winograd_weight.register_fake
def _(weight: Tensor) -> Tensor:
    return weight.new_empty(_shape(weight))


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
    `ipex::winograd_weight` makes it of [O, C, 3, 3], bias [O].
    """
    spots = weight.permute(0, 3, 2, 1).reshape(-1, weight.shape[2], 4, 4)
    plain = _gathered(_gathered(spots, 2), 3)
    result = epilogue.apply(torch.conv2d(x, plain, bias, 1, padding), other, binary, unary, [])
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


def _spread(window: Tensor, dim: int) -> Tensor:
    first, middle, last = window.unbind(dim)
    both, middle = (first + last) / 2, middle / 2
    return torch.stack([first, both + middle, both - middle, last], dim)


def _gathered(spots: Tensor, dim: int) -> Tensor:
    first, more, less, last = spots.unbind(dim)
    return torch.stack([first, more - less, last], dim)


def _shape(weight: Tensor) -> tuple[int, int, int, int]:
    return weight.shape[0] // PANEL, SPOTS, weight.shape[1], PANEL
