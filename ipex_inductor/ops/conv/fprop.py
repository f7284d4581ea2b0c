"""`ipex::conv_fprop`: a convolution of many channels as an implicit GEMM."""

import torch
from torch import Tensor

from ipex_inductor.ops.common.defining import Arguments, fake, op
from ipex_inductor.ops.conv.geometry import rows_of, sides


def rows_of_weight(weight: Tensor) -> Tensor:
    """Return the weight [O, C, h, w] with its channels last: [O, h * w * C]."""
    return weight.permute(0, 2, 3, 1).flatten(1).contiguous()


@op("conv_fprop")
def conv_fprop(
    x: Tensor,
    rows: Tensor,
    window: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    template: str,
    tile: list[int],
) -> Tensor:
    """Return `conv2d(x, weight)` as rows, one per pixel: [B * H' * W', O].

    This is the reference of the templates (`templates/triton/conv_fprop.py`, `conv_tma.py`).

    Args:
        x: [B, C, H, W] in channels-last.
        rows: the weight as `rows_of_weight` arranges it, [O, h * w * C].
        window: size of the kernel, [h, w].
        stride: of each dimension.
        padding: of each dimension.
        dilation: of each dimension.
        template: "fprop" or "boxes".
        tile: parameters of the template.
    """
    weight = rows.reshape(-1, *window, x.shape[1]).permute(0, 3, 1, 2)
    return rows_of(torch.conv2d(x, weight, None, stride, padding, dilation)).clone()


@fake(conv_fprop)
def _(call: Arguments) -> object:
    height, width = sides(call.x.shape[2:], call.window, call.stride, call.padding, call.dilation)
    return call.x.new_empty((call.x.shape[0] * height * width, call.rows.shape[0]))
