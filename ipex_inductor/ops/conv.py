"""`ipex::conv`: a 2-D convolution with what follows it: an addend, an activation."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ipex_inductor.ops.unary import UNARY

FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


@torch.library.custom_op("ipex::conv", mutates_args=())
def conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    other: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    unary: str,
    packed: str,
) -> Tensor:
    """`UNARY[unary].fn(conv2d(x, weight, bias, ...) + other)`.

    x [B, C, H, W], weight [O, C / groups, R, S], bias [O], other as the result. `packed` is "" for
    a plain weight: the reference, torch.nn.functional.conv2d defines the product. Otherwise the
    weight is in oneDNN's layout (`mkldnn::_reorder_convolution_weight`), whose shape says nothing
    of the format eager would give the result: `packed` names it, a key of `FORMATS`.
    """
    if not packed:
        return reference(x, weight, bias, other, stride, padding, dilation, groups, unary)
    known = UNARY[unary]
    window = (padding, stride, dilation, groups)
    op = torch.ops.mkldnn._convolution_pointwise
    result: Tensor = (
        op.default(x, weight, bias, *window, *known.words)
        if other is None
        else op.binary(x, other, weight, bias, *window, "add", 1.0, *known.words_after_add)
    )
    return result.contiguous(memory_format=FORMATS[packed])


def reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    other: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    unary: str,
) -> Tensor:
    """What `ipex::conv` computes, in torch's own ops."""
    product = F.conv2d(x, weight, bias, stride, padding, dilation, groups)
    return UNARY[unary].fn(product if other is None else product + other)


@conv.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    other: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    unary: str,
    packed: str,
) -> Tensor:
    if not packed:
        return reference(x, weight, bias, other, stride, padding, dilation, groups, unary)
    shape = [x.shape[0], weight.shape[0]]
    for axis in (0, 1):
        window = dilation[axis] * (weight.shape[axis + 2] - 1) + 1
        shape.append((x.shape[axis + 2] + 2 * padding[axis] - window) // stride[axis] + 1)
    return x.new_empty(shape).contiguous(memory_format=FORMATS[packed])
