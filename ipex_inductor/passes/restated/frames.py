"""Restate a 3D convolution of few channels as a 2D convolution of single frames.

    conv3d(x [N, 3, frames, H, W]) => conv2d(frames side by side [N * frames, taps * 3, H, W])

Networks for videos begin with such a layer. cuDNN has no kernel on tensor cores for three channels
in 3D: in bf16 on an H200 it took 1.6 of the 4.1 ms of a ResNet-18 for videos. The frames that a
window reads become channels, padded with zeros to whole vectors, as many as tensor cores read at
once.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Node = torch.fx.Node
aten = torch.ops.aten

NAME = "video-stem"
HALVES = (torch.bfloat16, torch.float16)
FEW = 4  # channels of an image
VECTOR = 8  # channels in 16 bytes
MOST = 16  # taps in time: so often the input is copied


def has_frames(node: Node) -> bool:
    """Return whether a node is a 3D convolution of few channels."""
    x, weight, _, _, _, dilation, transposed, _, groups = _read(node)
    return (
        x.meta["val"].dim() == 5
        and not transposed
        and groups == 1
        and dilation[0] == 1
        and _is_at_most(x.meta["val"].shape[1], FEW)
        and _is_at_most(weight.meta["val"].shape[2], MOST)
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


def convolve_frames(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    *_: Any,
) -> Tensor:
    """Compute the convolution frame by frame.

    Args:
        x: Videos (N, C, D, H, W).
        weight: (O, C, kd, kh, kw).
        bias: (O), or None.
        stride: In time, height and width, as are all that follow.
        padding: Zeros at both ends.
        dilation: 1 in time.

    Returns:
        (N, O, frames, rows, columns), a view of channels-last frames.
    """
    taps, window = weight.shape[2], weight.shape[3:]
    padded = F.pad(x, (0, 0, 0, 0, padding[0], padding[0]))
    read = padded.unfold(2, taps, stride[0]).permute(0, 2, 5, 1, 3, 4)  # N, frames, kd, C, H, W
    count = read.shape[1]
    images = read.reshape(-1, taps * x.shape[1], *x.shape[3:])
    kernel = weight.permute(0, 2, 1, 3, 4).reshape(weight.shape[0], images.shape[1], *window)
    missing = -images.shape[1] % VECTOR
    images, kernel = (F.pad(part, (0, 0, 0, 0, 0, missing)) for part in (images, kernel))
    result = aten.convolution.default(
        images.contiguous(memory_format=torch.channels_last),
        kernel.contiguous(memory_format=torch.channels_last),
        bias,
        stride[1:],
        padding[1:],
        dilation[1:],
        False,
        [0, 0],
        1,
    )
    videos: Tensor = result.unflatten(0, (-1, count)).transpose(1, 2)
    return videos


def _is_at_most(size: object, most: int) -> bool:
    """Return whether a size does not vary and is at most so large."""
    return isinstance(size, int) and size <= most


def _read(node: Node) -> Any:
    return node.args
