"""`ipex::conv_pool`: a convolution, ReLU and a max pool, the beginning of ResNet-like networks."""

import torch
from torch import Tensor

from ipex_inductor.ops.common.defining import op
from ipex_inductor.ops.conv.geometry import rows_of
from ipex_inductor.ops.conv.small_channel import from_matrix, runs

# Size, stride and padding of the pool of He et al. 2015 (arXiv:1512.03385).
WINDOW, STEP, AROUND = 3, 2, 1


def reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], padding: list[int]
) -> Tensor:
    """Return `max_pool2d(relu(conv2d(x, weight, bias, stride, padding)), 3, 2, 1)`.

    Args:
        x: [B, C, H, W].
        weight: [O, C, h, w].
        bias: [O].
        stride: of each dimension of the convolution.
        padding: of each dimension of the convolution.

    Returns:
        [B, O, H', W'].
    """
    activation = torch.relu(torch.conv2d(x, weight, bias, stride, padding))
    return torch.max_pool2d(activation, WINDOW, STEP, AROUND)


def rows(
    x: Tensor,
    matrix: Tensor,
    bias: Tensor | None,
    window: list[int],
    stride: list[int],
    padding: list[int],
    last: bool,
    tile: list[int],
) -> Tensor:
    """Return `reference` as rows, one per pixel: [B * H' * W', O].

    This is the reference of the template (`templates/triton/conv_small_channel_pool.py`).

    Args:
        x: [B, C, H, W].
        matrix: the weight as `ops.conv.small_channel.to_matrix` returns it.
        bias: [O].
        window: size of the kernel, [h, w].
        stride: of each dimension of the convolution.
        padding: of each dimension of the convolution.
        last: True if x is channels-last, else it is contiguous.
        tile: parameters of the template.
    """
    layout = runs(x.shape[1:], window, stride, padding, last)
    weight = from_matrix(matrix, layout, x.shape[1], window, last)
    return rows_of(reference(x, weight, bias, stride, padding)).contiguous()


conv_pool, stem_pool_rows = op("conv_pool")(reference), op("stem_pool_rows")(rows)
conv_pool.register_fake(reference)
stem_pool_rows.register_fake(rows)
