"""`ipex::cudnn_conv_relu`: cuDNN's convolutions that end in a relu, which aten has no fakes of."""

import torch
from torch import Tensor

from ipex_inductor.ops.defining import op

aten = torch.ops.aten


@op("cudnn_conv_relu")
def cudnn_conv_relu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    other: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Tensor:
    """`relu(conv2d(x, weight, bias, ...) + other)`, or without `other`; rounded once on a GPU.

    x [B, C, H, W], weight [O, C / groups, h, w], bias [O], other as the result, which is
    channels-last whatever came. This is the reference; `cuda` has cuDNN's own call.
    """
    product = torch.conv2d(x, weight, bias, stride, padding, dilation, groups)
    return _formatted(torch.relu(product if other is None else product + other))


@cudnn_conv_relu.register_kernel("cuda")
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    other: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Tensor:
    window = (stride, padding, dilation, groups)
    x, weight = _formatted(x), _formatted(weight)
    if other is None:
        result: Tensor = aten.cudnn_convolution_relu.default(x, weight, bias, *window)
    else:
        addend = _formatted(other)
        result = aten.cudnn_convolution_add_relu.default(x, weight, addend, 1.0, bias, *window)
    return result


@cudnn_conv_relu.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    other: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Tensor:
    return _formatted(torch.conv2d(x, weight, bias, stride, padding, dilation, groups))


def _formatted(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last)
