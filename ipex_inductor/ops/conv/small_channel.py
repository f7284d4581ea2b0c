"""`ipex::conv_stem`: a small-channel convolution as a GEMM with a rearranged weight."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ipex_inductor.ops.common.defining import Arguments, fake, op
from ipex_inductor.ops.conv.geometry import rows_of, sides

TERMS = 64  # K of the weight matrix is a multiple of this; rows beyond the kernel are zero
VECTOR = 8  # adjacent elements of one load


@dataclass(frozen=True)
class Runs:
    """The elements that an output pixel reads: `count` runs of `length` adjacent elements.

    An input that is channels-last has a run for each row of the window, and a contiguous one a run
    for each row of each channel. A run begins `shift` elements early and takes `width` rows of the
    weight matrix, so that all runs begin at multiples of the elements of one load.
    """

    count: int
    length: int
    shift: int
    width: int

    @property
    def terms(self) -> int:
        """Return the number of rows of the matrix."""
        return -(-self.count * self.width // TERMS) * TERMS


def runs(
    image: Sequence[int],
    window: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    last: bool,
) -> Runs:
    """Return the runs of a window on an input image.

    Args:
        image: shape of the input, [C, H, W].
        window: size of the window, [h, w].
        stride: of each dimension.
        padding: of each dimension.
        last: True if the input is channels-last, else it is contiguous.
    """
    channels, height, width = image
    unit, planes = (channels, 1) if last else (1, channels)
    steps = [stride[1] * unit, width * unit, channels * height * width]
    steps += [] if last else [height * width]
    aligned = math.gcd(VECTOR, *steps)
    shift = -padding[1] * unit % aligned
    length = window[1] * unit
    whole = -(-(length + shift) // aligned) * aligned
    return Runs(window[0] * planes, length, shift, whole)


def to_matrix(weight: Tensor, layout: Runs, last: bool) -> Tensor:
    """Return the weight [O, C, h, w] as a matrix [terms, O]."""
    rows = weight.permute(0, 2, 3, 1) if last else weight
    rows = rows.reshape(-1, layout.count, layout.length)
    rows = F.pad(rows, (layout.shift, layout.width - layout.length - layout.shift))
    rows = F.pad(rows.flatten(1), (0, layout.terms - layout.count * layout.width))
    return rows.t().contiguous()


def from_matrix(
    matrix: Tensor, layout: Runs, channels: int, window: list[int], last: bool
) -> Tensor:
    """Return the weight that `to_matrix` rearranged.

    Args:
        matrix: [terms, O].
        layout: runs of the kernel.
        channels: C.
        window: size of the kernel, [h, w].
        last: True for channels-last activations.
    """
    rows = matrix.t()[:, : layout.count * layout.width].reshape(-1, layout.count, layout.width)
    rows = rows[..., layout.shift : layout.shift + layout.length]
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
    """Return `conv2d(x, weight)` as rows, one per pixel: [B * H' * W', O]; any epilogue fuses.

    This is the reference of the template (`templates/triton/conv_small_channel.py`).

    Args:
        x: [B, C, H, W].
        matrix: the weight as `to_matrix` returns it.
        window: size of the kernel, [h, w].
        stride: of each dimension.
        padding: of each dimension.
        last: True if x is channels-last, else it is contiguous.
        tile: parameters of the template.
    """
    layout = runs(x.shape[1:], window, stride, padding, last)
    weight = from_matrix(matrix, layout, x.shape[1], window, last)
    return rows_of(torch.conv2d(x, weight, None, stride, padding)).contiguous()


@fake(conv_stem)
def _(call: Arguments) -> object:
    height, width = sides(call.x.shape[2:], call.window, call.stride, call.padding)
    return call.x.new_empty((call.x.shape[0] * height * width, call.matrix.shape[1]))
