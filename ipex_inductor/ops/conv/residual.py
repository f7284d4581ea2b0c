"""`ipex::conv_shortcut`: the sum of two 1 x 1 convolutions, the end of a residual block."""

import torch
from torch import Tensor

from ipex_inductor.ops.common.defining import op
from ipex_inductor.ops.conv.geometry import rows_of
from ipex_inductor.ops.gemm.skinny import sum_dtype


def reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    source: Tensor,
    projection: Tensor,
    stride: list[int],
) -> Tensor:
    """Return `relu(conv2d(x, weight, bias) + conv2d(source, projection, None, stride))`.

    A projection shortcut of He et al. 2015 (arXiv:1512.03385), without batch norms.

    Args:
        x: [B, C, H, W].
        weight: [O, C, 1, 1].
        bias: [O].
        source: [B, D, H', W']; every `stride`-th pixel is read.
        projection: [O, D, 1, 1].
        stride: of each dimension.

    Returns:
        [B, O, H, W].
    """
    projected = torch.conv2d(source, projection, None, stride)
    return torch.relu(torch.conv2d(x, weight, bias) + projected)


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
    """Return the sum of both GEMMs and the bias as rows, one per pixel, not rounded.

    The result is [B * H * W, O] in fp32 (fp64 for fp64). This is the reference of
    `templates/triton/residual.py`.

    Args:
        x: activation in channels-last.
        weight: matrix [O, C].
        bias: [O].
        source: activation in channels-last.
        projection: matrix [O, D].
        stride: of each dimension of `source`.
        template: "streamed" or "boxes".
        tile: parameters of the template.
    """
    wide = sum_dtype(x)
    read = source[:, :, :: stride[0], :: stride[1]]
    product = rows_of(x).to(wide) @ weight.to(wide).t()
    return product + rows_of(read).to(wide) @ projection.to(wide).t() + bias.to(wide)


conv_shortcut, shortcut_rows = op("conv_shortcut")(reference), op("shortcut_rows")(rows)
conv_shortcut.register_fake(reference)
shortcut_rows.register_fake(rows)
