"""`ipex::conv_depthwise`: a depthwise convolution."""

import torch
from torch import Tensor

from ipex_inductor.ops.common.defining import Arguments, fake, op
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


@fake(conv_depthwise)
def _(call: Arguments) -> object:
    height, width = sides(call.x.shape[2:], call.window, call.stride, call.padding, call.dilation)
    return call.x.new_empty((call.x.shape[0] * height * width, call.x.shape[1]))
