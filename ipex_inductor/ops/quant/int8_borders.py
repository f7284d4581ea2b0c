"""Taps of a kernel that lie outside of an image: padding, and pixels by what they miss."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ipex_inductor.ops.conv.geometry import sides


def split_padding(padding: Sequence[int], dims: int) -> tuple[Sequence[int], Sequence[int]]:
    """Return the padding at the begin and at the end of each dimension."""
    return padding[:dims], padding[-dims:]


def pad_sizes(padding: Sequence[int], dims: int) -> list[int]:
    """Return the padding as `torch.nn.functional.pad` takes it: the last dimension first."""
    pairs = zip(*split_padding(padding, dims), strict=True)
    return [size for pair in reversed([*pairs]) for size in pair]


def edges_of(
    image: Sequence[int],
    window: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> tuple[int, ...]:
    """Return the most taps outside of an image: above, below, before and after it.

    Args:
        image: size of the activation, [H, W].
        window: size of the kernel, [h, w].
        stride: of each dimension.
        padding: of each dimension.
        dilation: of each dimension.
    """
    axes = zip(
        image,
        sides(image, window, stride, padding, dilation),
        window,
        stride,
        padding,
        dilation,
        strict=True,
    )
    edges: list[int] = []
    for size, count, taps, step, pad, reach in axes:
        past = (count - 1) * step - pad + (taps - 1) * reach - (size - 1)
        edges += [min(taps, max(0, -(-outside // reach))) for outside in (pad, past)]
    return tuple(edges)


def class_of_pixels(
    image: Sequence[int],
    window: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """Return a number for each output pixel, [H', W'], by its taps outside of the image.

    Args:
        image: size of the activation, [H, W].
        window: size of the kernel, [h, w].
        stride: of each dimension.
        padding: of each dimension.
        dilation: of each dimension.
    """
    edges = edges_of(image, window, stride, padding, dilation)
    numbers = []
    for axis, count in enumerate(sides(image, window, stride, padding, dilation)):
        first = torch.arange(count) * stride[axis] - padding[axis]
        past = first + (window[axis] - 1) * dilation[axis] - (image[axis] - 1)
        most = edges[2 * axis : 2 * axis + 2]
        missing = [
            torch.clamp(
                (outside + dilation[axis] - 1).div(dilation[axis], rounding_mode="floor"), 0, end
            )
            for outside, end in zip((-first, past), most, strict=True)
        ]
        numbers.append(missing[0] * (most[1] + 1) + missing[1])
    return numbers[0][:, None] * ((edges[2] + 1) * (edges[3] + 1)) + numbers[1]
