"""`ipex::conv_depthwise`: a depthwise convolution."""

import torch
from torch import Tensor

from ipex_inductor.ops.common.defining import op
from ipex_inductor.ops.conv.geometry import rows_of, sides


def taps(weight: Tensor) -> Tensor:
    """Return the weight [C, 1, h, w] with its channels last: [h * w, C]."""
    return weight.flatten(1).t().contiguous()


@op("conv_depthwise")
def conv_depthwise(
    x: Tensor,
    taps: Tensor,
    window: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    template: str,
    tile: list[int],
) -> Tensor:
    """Return `conv2d(x, weight, groups=C)` as rows, one per pixel: [B * H' * W', C].

    This is the reference of the templates (`templates/triton/conv_depthwise.py`, `conv_strips.py`).

    Args:
        x: [B, C, H, W] in channels-last.
        taps: the weight as `taps` arranges it, [h * w, C].
        window: size of the kernel, [h, w].
        stride: of each dimension.
        padding: of each dimension.
        dilation: of each dimension.
        template: "depthwise" or "strips".
        tile: parameters of the template.
    """
    weight = taps.t().reshape(-1, 1, *window)
    result = torch.conv2d(x, weight, None, stride, padding, dilation, x.shape[1])
    return rows_of(result).contiguous()


@conv_depthwise.register_fake
def _(
    x: Tensor,
    taps: Tensor,
    window: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    template: str,
    tile: list[int],
) -> Tensor:
    height, width = sides(x.shape[2:], window, stride, padding, dilation)
    return x.new_empty((x.shape[0] * height * width, x.shape[1]))
