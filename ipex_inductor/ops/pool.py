"""`ipex::norm_relu_pool`, `ipex::max_pool_backward`: a max pool that says where in a window.

An offset is the place in its window that a value came from, row by row, as torch's
`_low_memory_max_pool_with_offsets` has it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ipex_inductor.ops.defining import op
from ipex_inductor.ops.stem import rows_of, sides


@op("norm_relu_pool")
def norm_relu_pool(
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor,
    bias: Tensor,
    window: list[int],
    stride: list[int],
    padding: list[int],
) -> tuple[Tensor, Tensor]:
    """`max_pool2d(relu((x - mean) * rstd * weight + bias))` and its offsets, as rows [B*H'*W', C].

    x [B, C, H, W] in channels-last; what is made of it in fp32 is rounded to its dtype before the
    relu, as by torch; all else [C] in fp32. Offsets are int8. This is the reference.
    """
    each = (t.view(-1, 1, 1) for t in (mean, rstd, weight, bias))
    mean, rstd, weight, bias = each
    made = torch.relu(((x.float() - mean) * rstd * weight + bias).to(x.dtype))
    pooled, at = F.max_pool2d(made, window, stride, padding, return_indices=True)
    first = _first(pooled, stride, padding)
    down, along = at // x.shape[3] - first[0], at % x.shape[3] - first[1]
    offsets = (down * window[1] + along).to(torch.int8)
    return rows_of(pooled).contiguous(), rows_of(offsets).contiguous()


@norm_relu_pool.register_fake
def _(
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor,
    bias: Tensor,
    window: list[int],
    stride: list[int],
    padding: list[int],
) -> tuple[Tensor, Tensor]:
    height, width = sides(x.shape[2:], window, stride, padding)
    size = x.shape[0] * height * width, x.shape[1]
    return x.new_empty(size), x.new_empty(size, dtype=torch.int8)


@op("max_pool_backward")
def max_pool_backward(
    grad: Tensor,
    offsets: Tensor,
    image: list[int],
    window: list[int],
    stride: list[int],
    padding: list[int],
) -> Tensor:
    """The gradient of an `image` [H, W] that `max_pool2d` took to [H', W'], as rows [B * H * W, C].

    grad [B, C, H', W'] of any floating dtype, which the rows get; offsets [B, C, H', W'], int8.
    Added in fp32, rounded once, as Inductor does. This is the reference.
    """
    places, first = offsets.long(), _first(grad, stride, padding)
    at = (first[0] + places // window[1]) * image[1] + first[1] + places % window[1]
    found = grad.new_zeros((*grad.shape[:2], image[0] * image[1]), dtype=torch.float32)
    found.scatter_add_(2, at.flatten(2), grad.flatten(2).float())
    return rows_of(found.to(grad.dtype).view(*grad.shape[:2], *image)).contiguous()


@max_pool_backward.register_fake
def _(
    grad: Tensor,
    offsets: Tensor,
    image: list[int],
    window: list[int],
    stride: list[int],
    padding: list[int],
) -> Tensor:
    return grad.new_empty((grad.shape[0] * image[0] * image[1], grad.shape[1]))


def _first(pooled: Tensor, stride: list[int], padding: list[int]) -> list[Tensor]:
    """The row and the column in the image where each window begins."""
    down, along = (
        torch.arange(size, device=pooled.device) * step - pad
        for size, step, pad in zip(pooled.shape[2:], stride, padding, strict=True)
    )
    return [down[:, None], along]
