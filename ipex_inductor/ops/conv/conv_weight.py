"""`ipex::conv_weight_grad`: the weight gradient of a convolution without its other gradients.

`ipex::conv_stem_weight` computes it for few channels: partial sums over parts of all pixels.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ipex_inductor.ops.common.defining import Arguments, fake, op
from ipex_inductor.ops.conv.geometry import rows_of, sides
from ipex_inductor.ops.conv.small_channel import runs, to_matrix
from ipex_inductor.ops.gemm.skinny import sum_dtype

ALONE = [False, True, False]  # output mask of convolution_backward: input, weight, bias


@op("conv_weight_grad")
def conv_weight_grad(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Tensor:
    """Return the gradient of `weight` in `conv2d(x, weight)`, shaped as the weight.

    torch.ops.aten.convolution_backward defines it.

    Args:
        grad: gradient of the result, [B, O, H', W'].
        x: [B, C, H, W].
        weight: [O, C / groups, h, w]; only its metadata is read.
        stride: of each dimension.
        padding: of each dimension.
        dilation: of each dimension.
        groups: number of groups.
    """
    return reference(grad, x, weight, stride, padding, dilation, groups)


def reference(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Tensor:
    """Return what `ipex::conv_weight_grad` computes, with torch's own op.

    Args:
        grad: gradient of the result, [B, O, H', W'].
        x: [B, C, H, W].
        weight: [O, C / groups, h, w]; only its metadata is read.
        stride: of each dimension.
        padding: of each dimension.
        dilation: of each dimension.
        groups: number of groups.
    """
    geometry = stride, padding, dilation, False, [0] * len(stride), groups
    _, weight_grad, _ = torch.ops.aten.convolution_backward(grad, x, weight, None, *geometry, ALONE)
    result: Tensor = weight_grad
    return result


@fake(conv_weight_grad)
def _(call: Arguments) -> object:
    return reference(
        call.grad, call.x, call.weight, call.stride, call.padding, call.dilation, call.groups
    )


@op("conv_stem_weight")
def conv_stem_weight(
    grad: Tensor,
    x: Tensor,
    window: list[int],
    stride: list[int],
    padding: list[int],
    last: bool,
    pixels: int,
    terms: int,
    tile: list[int],
) -> Tensor:
    """Return partial sums over `pixels` output pixels each, stacked along rows, not rounded.

    This is the reference of the template (`templates/triton/conv_small_channel_weight.py`).

    Args:
        grad: gradient of the result, [B, O, H', W'].
        x: [B, C, H, W].
        window: size of the kernel, [h, w].
        stride: of each dimension.
        padding: of each dimension.
        last: True if x is channels-last, else it is contiguous.
        pixels: output pixels of a part.
        terms: K of the weight matrix.
        tile: parameters of the template.

    Returns:
        [ceil(B * H' * W' / pixels) * O, terms] in fp32 (fp64 for fp64). Each part is the transpose
            of a matrix by `ops.conv.small_channel.to_matrix`; elements outside its runs are
            undefined.
    """
    channels, wide = x.shape[1], sum_dtype(x)
    patches = F.unfold(x.to(wide), (*window,), padding=(*padding,), stride=(*stride,))
    patches = patches.transpose(1, 2).reshape(-1, channels, *window)
    matrix = to_matrix(patches, runs(x.shape[1:], window, stride, padding, last), last)
    matrix = F.pad(matrix, (0, 0, 0, terms - matrix.shape[0])).t()
    factors = torch.split(rows_of(grad.to(wide)), pixels), torch.split(matrix, pixels)
    parts = zip(*factors, strict=True)
    return torch.cat([rows.t() @ part for rows, part in parts])


@fake(conv_stem_weight)
def _(call: Arguments) -> object:
    height, width = sides(call.x.shape[2:], call.window, call.stride, call.padding)
    parts = -(-call.x.shape[0] * height * width // call.pixels)
    return call.x.new_empty((parts * call.grad.shape[1], call.terms), dtype=sum_dtype(call.x))
