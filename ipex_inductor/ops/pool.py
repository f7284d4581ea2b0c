"""`ipex::max_pool_backward`: the gradient of an image, by where in its window each value was."""

import torch
from torch import Tensor

from ipex_inductor.ops.defining import op
from ipex_inductor.ops.stem import rows_of


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

    grad [B, C, H', W'] of any floating dtype, which the rows get; offsets [B, C, H', W'], int8:
    the place of its window that a value came from, row by row (as torch's
    `_low_memory_max_pool_with_offsets` has it). Added in fp32, rounded once, as Inductor does.
    This is the reference.
    """
    places = offsets.long()
    first = [
        (torch.arange(size, device=grad.device) * step - pad).view(-1, *[1] * last)
        for size, step, pad, last in zip(grad.shape[2:], stride, padding, (1, 0), strict=True)
    ]
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
