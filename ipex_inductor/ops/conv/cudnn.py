"""`ipex::cudnn_conv_relu`: cuDNN's convolutions with a ReLU epilogue, which lack fakes in aten."""

import torch
from torch import Tensor

from ipex_inductor.ops.common.defining import Arguments, fake, op

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
    """Return `relu(conv2d(x, weight, bias, ...) + other)`, rounded once on a GPU.

    This is the reference; the `cuda` kernel calls cuDNN.

    Args:
        x: [B, C, H, W] in any memory format.
        weight: [O, C / groups, h, w].
        bias: [O].
        other: as the result; None: nothing is added.
        stride: of each dimension.
        padding: of each dimension.
        dilation: of each dimension.
        groups: number of groups.

    Returns:
        [B, O, H', W'] in channels-last.
    """
    product = torch.conv2d(x, weight, bias, stride, padding, dilation, groups)
    return _channels_last(torch.relu(product if other is None else product + other))


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
    x, weight = _channels_last(x), _channels_last(weight)
    if other is None:
        result: Tensor = aten.cudnn_convolution_relu.default(x, weight, bias, *window)
    else:
        addend = _channels_last(other)
        result = aten.cudnn_convolution_add_relu.default(x, weight, addend, 1.0, bias, *window)
    return result


@fake(cudnn_conv_relu)
def _(call: Arguments) -> object:
    return _channels_last(
        torch.conv2d(
            call.x, call.weight, call.bias, call.stride, call.padding, call.dilation, call.groups
        )
    )


def _channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last)
