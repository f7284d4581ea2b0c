"""Restate a convolution whose windows do not overlap as a GEMM on its patches.

    conv(x, w, stride=window) => patches(x) [pixels, K] @ w [K, channels]

Vision transformers embed patches so, and SegFormer and PVT reduce their keys so. cuDNN computes
these windows by kernels for overlapping ones, and converts images of three channels first. A copy
of the input and a GEMM take less time (`python -m benchmarks patches`).
"""

import math
from typing import Any

import torch
from torch import Tensor

from ipex_inductor import compat

Node = torch.fx.Node
aten = torch.ops.aten

NAME = "patch-conv"
HALVES = (torch.bfloat16, torch.float16)
# The small-channel template is faster for windows of so few pixels of images of so few channels:
# 27 us beside 44 for 64 images, 4 x 4 and 96 outputs on an H200 (`autotune/tables`).
FEW_CHANNELS, FEW_PIXELS = 4, 16


def has_patches(node: Node) -> bool:
    """Return whether a node is a 2D convolution with windows that lie side by side."""
    x, weight, _, stride, padding, dilation, transposed, _, groups = _read(node)
    if x.meta["val"].dim() != 4 or transposed or groups != 1:
        return False
    window = [*weight.meta["val"].shape[2:]]
    channels = x.meta["val"].shape[1]
    least = FEW_PIXELS if isinstance(channels, int) and channels <= FEW_CHANNELS else 1
    return (
        window == [*stride]
        and math.prod(window) > least
        and not any(padding)
        and all(step == 1 for step in dilation)
    )


def why_not(node: Node) -> str | None:
    """Return why the convolution is not restated, or None."""
    x, weight, *_ = _read(node)
    image = x.meta["val"]
    if image.dtype not in HALVES:
        return f"it is measured in 16 bits alone, and this is in {image.dtype}"
    sizes = (*image.shape[1:], *image.stride(), *weight.meta["val"].shape)
    if not all(isinstance(size, int) for size in sizes):
        return "other sizes than its batch vary"
    return None if math.prod(node.meta["val"].shape[1:]) else "it is empty"


def multiply_patches(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], *_: Any
) -> Tensor:
    """Compute the convolution as a GEMM.

    Args:
        x: Images (N, C, H, W); rows and columns behind the last whole patch are left out.
        weight: (O, C, p, q).
        bias: (O), or None.
        stride: The window's sizes p and q.

    Returns:
        (N, O, H // p, W // q), a view of channels-last rows.
    """
    channels, height, width = x.shape[1:]
    outputs, p, q = weight.shape[0], *weight.shape[2:]
    rows, columns = height // p, width // q
    x = x[:, :, : rows * p, : columns * q]
    tiles = x.reshape(-1, channels, rows, p, columns, q)
    # Elements that are neighbors in memory stay neighbors, so that whole vectors are copied.
    if compat.is_channels_last(x):
        tiles, weight = tiles.permute(0, 2, 4, 3, 5, 1), weight.permute(0, 2, 3, 1)
    else:
        tiles = tiles.permute(0, 2, 4, 1, 3, 5)
    matrix = weight.reshape(outputs, channels * p * q).t()
    patches = tiles.reshape(-1, channels * p * q)
    product = patches @ matrix if bias is None else torch.addmm(bias, patches, matrix)
    return product.view(-1, rows, columns, outputs).permute(0, 3, 1, 2)


def _read(node: Node) -> Any:
    return node.args
