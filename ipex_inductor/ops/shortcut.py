"""`ipex::conv_shortcut`: two convolutions of one pixel, added: how a block of a ResNet ends."""

import torch
from torch import Tensor

from ipex_inductor.ops.defining import op
from ipex_inductor.ops.few_rows import unrounded
from ipex_inductor.ops.stem import rows_of


def reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    source: Tensor,
    projection: Tensor,
    stride: list[int],
) -> Tensor:
    """`relu(conv2d(x, weight, bias) + conv2d(source, projection, None, stride))`.

    x [B, C, H, W], weight [O, C, 1, 1], bias [O], source [B, D, H', W'] whose every `stride`-th
    pixel is read, projection [O, D, 1, 1] -> [B, O, H, W]. What He et al. 2015 (arXiv:1512.03385)
    call a projection shortcut, without batch norms.
    """
    beside = torch.conv2d(source, projection, None, stride)
    return torch.relu(torch.conv2d(x, weight, bias) + beside)


def rows(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    source: Tensor,
    projection: Tensor,
    stride: list[int],
    template: str,
    tile: list[int],
) -> Tensor:
    """The sum of both products and the bias as rows, a pixel each, not rounded: [B * H * W, O].

    `weight` [O, C] and `projection` [O, D] are matrices, x and source images in channels-last; in
    fp32, of fp64 in fp64. `template` is "streamed" or "boxes", `tile` for it
    (`templates/triton/residual.py`). This is the reference.
    """
    wide = unrounded(x)
    read = source[:, :, :: stride[0], :: stride[1]]
    made = rows_of(x).to(wide) @ weight.to(wide).t()
    return made + rows_of(read).to(wide) @ projection.to(wide).t() + bias.to(wide)


conv_shortcut, shortcut_rows = op("conv_shortcut")(reference), op("shortcut_rows")(rows)
conv_shortcut.register_fake(reference)
shortcut_rows.register_fake(rows)
