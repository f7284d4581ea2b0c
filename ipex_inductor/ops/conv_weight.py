"""`ipex::conv_weight_grad`: the gradient of a convolution's weight alone, as of a net's stem.

`ipex::conv_stem_weight` is it where channels are few: sums over parts of all pixels.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ipex_inductor.ops.defining import op
from ipex_inductor.ops.few_rows import unrounded
from ipex_inductor.ops.stem import arranged, rows_of, runs, sides

ALONE = [False, True, False]  # of a convolution's gradients: the input's, the weight's, the bias'


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
    """The gradient of `weight` in `conv2d(x, weight)`, by that of the result: as the weight.

    grad [B, O, H', W'], x [B, C, H, W], weight [O, C / groups, h, w], of which nothing is read but
    what it is like. torch.ops.aten.convolution_backward defines it.
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
    """What `ipex::conv_weight_grad` computes, in torch's own op."""
    around = stride, padding, dilation, False, [0] * len(stride), groups
    _, made, _ = torch.ops.aten.convolution_backward(grad, x, weight, None, *around, ALONE)
    result: Tensor = made
    return result


@conv_weight_grad.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Tensor:
    return reference(grad, x, weight, stride, padding, dilation, groups)


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
    """Sums of `pixels` output pixels each, one part below the other, not rounded.

    grad [B, O, H', W'], x [B, C, H, W]; `last`: x is channels-last, or else contiguous ->
    [ceil(B * H' * W' / pixels) * O, terms] in fp32, of fp64 in fp64, each part the transpose of
    what `ops.stem.arranged` makes of a weight. What lies beside its runs may be anything. `tile` is
    for the template (`templates/triton/conv_small_channel_weight.py`). This is the reference.
    """
    channels, wide = x.shape[1], unrounded(x)
    patches = F.unfold(x.to(wide), (*window,), padding=(*padding,), stride=(*stride,))
    patches = patches.transpose(1, 2).reshape(-1, channels, *window)
    matrix = arranged(patches, runs(x.shape[1:], window, stride, padding, last), last)
    matrix = F.pad(matrix, (0, 0, 0, terms - matrix.shape[0])).t()
    factors = torch.split(rows_of(grad.to(wide)), pixels), torch.split(matrix, pixels)
    parts = zip(*factors, strict=True)
    return torch.cat([rows.t() @ part for rows, part in parts])


@conv_stem_weight.register_fake
def _(
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
    height, width = sides(x.shape[2:], window, stride, padding)
    parts = -(-x.shape[0] * height * width // pixels)
    return x.new_empty((parts * grad.shape[1], terms), dtype=unrounded(x))
