"""Restate a 3D convolution of few channels as a 2D convolution of single frames.

    conv3d(x [N, 3, frames, H, W]) => conv2d(frames side by side [N * frames, taps * 3, H, W])

Networks for videos begin with such a layer. cuDNN has no kernel on tensor cores for three channels
in 3D: in bf16 on an H200 it took 1.6 of the 4.1 ms of a ResNet-18 for videos (`python -m benchmarks
zoo_gpu --models r3d_18 --kernels 3`). The frames that a window reads become channels, padded with
zeros to whole vectors, as many as tensor cores read at once.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ipex_inductor.passes.restated import windows
from ipex_inductor.passes.restated.patches import is_by_patches
from ipex_inductor.passes.restated.windows import Convolution

Node = torch.fx.Node
aten = torch.ops.aten

NAME = "video-stem"
FEW = 4  # channels of an image
VECTOR = 8  # channels in 16 bytes
MOST = 16  # taps in time: so often the input is copied


def has_frames(node: Node) -> bool:
    """Return whether a node is a 3D convolution in 16 bits of few channels, not of patches."""
    convolution = windows.read(node)
    _, channels, *window = windows.shape(convolution.weight)
    if len(window) != 3 or not convolution.is_dense or not windows.is_in_16_bits(node):
        return False
    is_small = windows.is_at_most(channels, FEW) and windows.is_at_most(window[0], MOST)
    return is_small and convolution.dilation[0] == 1 and not is_by_patches(convolution)


def convolve_frames(*args: Any) -> Tensor:
    """Compute the convolution frame by frame.

    Args:
        *args: The arguments of `aten.convolution`: videos (N, C, D, H, W), weight
            (O, C, kd, kh, kw), bias (O) or None, stride, padding, dilation (1 in time), ...

    Returns:
        (N, O, frames, rows, columns), a view of channels-last frames.
    """
    convolution = Convolution(args)
    x, weight = convolution.x, convolution.weight
    stride, padding, dilation = convolution.stride, convolution.padding, convolution.dilation
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
        convolution.bias,
        stride[1:],
        padding[1:],
        dilation[1:],
        False,
        [0, 0],
        1,
    )
    videos: Tensor = result.unflatten(0, (-1, count)).transpose(1, 2)
    return videos
