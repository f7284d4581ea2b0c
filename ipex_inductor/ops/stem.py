"""`ipex::conv_stem`: a convolution of few channels, whose weight is the matrix of a product."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ipex_inductor.ops.defining import op

TERMS = 64  # a matrix has a multiple of so many rows: those beyond the window are zero
VECTOR = 8  # neighbours that one load may take


@dataclass(frozen=True)
class Runs:
    """What one output pixel reads of an image: `count` runs of `length` neighbours in memory.

    An image is channels-last, with a run for each row of the window, or contiguous, with one for
    each row of each channel. A run begins `shift` early, and takes `width` rows of the matrix, so
    that all of them begin at multiples of what one load takes.
    """

    count: int
    length: int
    shift: int
    width: int

    @property
    def terms(self) -> int:
        """The rows of the matrix."""
        return -(-self.count * self.width // TERMS) * TERMS


def runs(
    image: Sequence[int],
    window: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    last: bool,
) -> Runs:
    """The runs of a window [h, w] on an image [C, H, W]; `last`: its channels are."""
    channels, height, width = image
    unit, planes = (channels, 1) if last else (1, channels)
    steps = [stride[1] * unit, width * unit, channels * height * width]
    steps += [] if last else [height * width]
    aligned = math.gcd(VECTOR, *steps)
    shift = -padding[1] * unit % aligned
    length = window[1] * unit
    whole = -(-(length + shift) // aligned) * aligned
    return Runs(window[0] * planes, length, shift, whole)


def arranged(weight: Tensor, found: Runs, last: bool) -> Tensor:
    """The weight [O, C, h, w] as a matrix [terms, O]."""
    rows = weight.permute(0, 2, 3, 1) if last else weight
    rows = rows.reshape(-1, found.count, found.length)
    rows = F.pad(rows, (found.shift, found.width - found.length - found.shift))
    rows = F.pad(rows.flatten(1), (0, found.terms - found.count * found.width))
    return rows.t().contiguous()


def restored(matrix: Tensor, found: Runs, channels: int, window: list[int], last: bool) -> Tensor:
    """The weight that `arranged` made the matrix of."""
    rows = matrix.t()[:, : found.count * found.width].reshape(-1, found.count, found.width)
    rows = rows[..., found.shift : found.shift + found.length]
    if last:
        return rows.reshape(-1, *window, channels).permute(0, 3, 1, 2)
    return rows.reshape(-1, channels, *window)


@op("conv_stem")
def conv_stem(
    x: Tensor,
    matrix: Tensor,
    window: list[int],
    stride: list[int],
    padding: list[int],
    last: bool,
    tile: list[int],
) -> Tensor:
    """`conv2d(x, weight)` as rows, a pixel each: [B * H' * W', O], so that any epilogue fuses.

    x [B, C, H, W], `matrix` what `arranged` made of a weight of that `window`; `last`: x is
    channels-last, or else contiguous. `tile` is for the template
    (`templates/triton/conv_small_channel.py`). This is the reference.
    """
    found = runs(x.shape[1:], window, stride, padding, last)
    weight = restored(matrix, found, x.shape[1], window, last)
    return rows_of(torch.conv2d(x, weight, None, stride, padding)).contiguous()


@conv_stem.register_fake
def _(
    x: Tensor,
    matrix: Tensor,
    window: list[int],
    stride: list[int],
    padding: list[int],
    last: bool,
    tile: list[int],
) -> Tensor:
    height, width = sides(x.shape[2:], window, stride, padding)
    return x.new_empty((x.shape[0] * height * width, matrix.shape[1]))


def sides(
    image: Sequence[int],
    window: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int] = (1, 1),
) -> tuple[int, int]:
    """The height and width of a convolution's result."""
    height, width = (
        (size + 2 * around - step * (reach - 1) - 1) // stride + 1
        for size, reach, stride, around, step in zip(
            image, window, stride, padding, dilation, strict=True
        )
    )
    return height, width


def rows_of(image: Tensor) -> Tensor:
    """[B, C, H, W] in channels-last as [B * H * W, C]."""
    return image.permute(0, 2, 3, 1).reshape(-1, image.shape[1])


def image_of(rows: Tensor, batch: int, height: int, width: int) -> Tensor:
    """[B * H * W, C] as [B, C, H, W] in channels-last."""
    return rows.view(batch, height, width, -1).permute(0, 3, 1, 2)
