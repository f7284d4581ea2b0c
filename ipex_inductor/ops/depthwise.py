"""`ipex::conv_depthwise`: a convolution of each channel by itself."""

import torch
from torch import Tensor

from ipex_inductor.ops.defining import op
from ipex_inductor.ops.stem import rows_of, sides


def taps(weight: Tensor) -> Tensor:
    """The weight [C, 1, h, w] with its channels side by side: [h * w, C]."""
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
    """`conv2d(x, weight, groups=C)` as rows, a pixel each: [B * H' * W', C].

    x [B, C, H, W] in channels-last, `taps` of a weight with that `window`. `tile` is for the
    `template`: "depthwise" or "strips" (`templates/triton/conv_depthwise.py`, `conv_strips.py`).
    This is the reference.
    """
    weight = taps.t().reshape(-1, 1, *window)
    made = torch.conv2d(x, weight, None, stride, padding, dilation, x.shape[1])
    return rows_of(made).contiguous()


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
