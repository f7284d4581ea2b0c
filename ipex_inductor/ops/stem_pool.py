"""`ipex::conv_pool`: a convolution, relu and a max pool: how the nets after ResNet begin."""

import torch
from torch import Tensor

from ipex_inductor.ops.defining import op
from ipex_inductor.ops.stem import restored, rows_of, runs

# The pool of He et al. 2015 (arXiv:1512.03385).
WINDOW, STEP, AROUND = 3, 2, 1


def reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], padding: list[int]
) -> Tensor:
    """`max_pool2d(relu(conv2d(x, weight, bias, stride, padding)), 3, 2, 1)`.

    x [B, C, H, W], weight [O, C, h, w], bias [O] -> [B, O, H', W'].
    """
    made = torch.relu(torch.conv2d(x, weight, bias, stride, padding))
    return torch.max_pool2d(made, WINDOW, STEP, AROUND)


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
    """The same as rows, a pixel each: [B * H' * W', O].

    `matrix` is what `ops/stem.py: arranged` made of a weight of that `window`; `last`: x is
    channels-last, or else contiguous. `tile` is for the template
    (`templates/triton/conv_small_channel_pool.py`). This is the reference.
    """
    found = runs(x.shape[1:], window, stride, padding, last)
    weight = restored(matrix, found, x.shape[1], window, last)
    return rows_of(reference(x, weight, bias, stride, padding)).contiguous()


conv_pool, stem_pool_rows = op("conv_pool")(reference), op("stem_pool_rows")(rows)
conv_pool.register_fake(reference)
stem_pool_rows.register_fake(rows)
