"""Restate a convolution whose windows do not overlap as a GEMM on its patches.

    conv(x, w, stride=window) => patches(x) [pixels, K] @ w [K, channels]

Vision transformers embed patches of images or videos so, and SegFormer and PVT reduce their keys
so. cuDNN computes these windows by kernels for overlapping ones, and converts images of three
channels first. A copy of the input and a GEMM take less time (`python -m benchmarks patches`).
"""

import math
from typing import Any

import torch
from torch import Tensor

from ipex_inductor import compat
from ipex_inductor.passes.restated import windows
from ipex_inductor.passes.restated.windows import Convolution

Node = torch.fx.Node

NAME = "patch-conv"
RANKS = (4, 5)  # images and videos
# The small-channel template is faster for windows of so few pixels of images of so few channels:
# 27 us beside 44 for 64 images, 4 x 4 and 96 outputs on an H200 (`autotune/tables`).
FEW_CHANNELS, FEW_PIXELS = 4, 16


def has_patches(node: Node) -> bool:
    """Return whether a node is a convolution in 16 bits with windows that lie side by side."""
    convolution = windows.read(node)
    if not windows.is_in_16_bits(node) or not convolution.is_dense:
        return False
    return is_by_patches(convolution) and not _has_template(convolution)


def is_by_patches(convolution: Convolution) -> bool:
    """Return whether windows of more than a pixel lie side by side, without zeros between."""
    window = [*windows.shape(convolution.weight)[2:]]
    is_known = len(window) + 2 in RANKS and all(isinstance(size, int) for size in window)
    is_adjacent = window == convolution.stride and not any(convolution.padding)
    return (
        is_known
        and is_adjacent
        and math.prod(window) > 1
        and all(step == 1 for step in convolution.dilation)
    )


def _has_template(convolution: Convolution) -> bool:
    """Return whether the small-channel template computes a convolution faster."""
    channels, *window = windows.shape(convolution.weight)[1:]
    is_image, is_small = len(window) == 2, math.prod(window) <= FEW_PIXELS
    return is_image and is_small and windows.is_at_most(channels, FEW_CHANNELS)


def multiply_patches(*args: Any) -> Tensor:
    """Compute the convolution as a GEMM.

    Args:
        *args: The arguments of `aten.convolution`: images (N, C, *sizes), whose rows and columns
            behind the last whole patch are left out, weight (O, C, *window), bias (O) or None, ...

    Returns:
        (N, O, *patches), a view of channels-last rows.
    """
    convolution = Convolution(args)
    x, weight, bias = convolution.x, convolution.weight, convolution.bias
    outputs, channels, *window = weight.shape
    counts = [size // side for size, side in zip(x.shape[2:], window, strict=True)]
    for dim, (count, side) in enumerate(zip(counts, window, strict=True), start=2):
        x = x.narrow(dim, 0, count * side)
    pairs = [size for pair in zip(counts, window, strict=True) for size in pair]
    tiles = x.reshape(-1, channels, *pairs)
    rank = len(window)
    patch, pixels = [2 + 2 * n for n in range(rank)], [3 + 2 * n for n in range(rank)]
    # Elements that are neighbors in memory stay neighbors, so that whole vectors are copied.
    if compat.is_channels_last(x):
        tiles = tiles.permute(0, *patch, *pixels, 1)
        weight = weight.permute(0, *range(2, 2 + rank), 1)
    else:
        tiles = tiles.permute(0, *patch, 1, *pixels)
    matrix = weight.reshape(outputs, -1).t()
    rows = tiles.reshape(-1, channels * math.prod(window))
    product = rows @ matrix if bias is None else torch.addmm(bias, rows, matrix)
    return product.view(-1, *counts, outputs).movedim(-1, 1)
