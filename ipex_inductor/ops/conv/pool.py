"""`ipex::norm_relu_pool`, `ipex::max_pool_backward`: max pooling with offsets in the kernel.

An offset is the row-major index of the tap that a value came from, as in torch's
`_low_memory_max_pool_with_offsets`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ipex_inductor.ops.common.defining import Arguments, fake, op
from ipex_inductor.ops.conv.geometry import rows_of, sides


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
    """Return `max_pool2d(relu((x - mean) * rstd * weight + bias))` and its offsets, as rows.

    The normalized activation is computed in fp32 and rounded to the dtype of x before the ReLU, as
    in torch. This is the reference.

    Args:
        x: [B, C, H, W] in channels-last.
        mean: [C] in fp32.
        rstd: [C] in fp32.
        weight: [C] in fp32.
        bias: [C] in fp32.
        window: size of the pooling kernel, [h, w].
        stride: of each dimension.
        padding: of each dimension.

    Returns:
        Values [B * H' * W', C] in the dtype of x, and offsets of this shape in int8.
    """
    channels = (t.view(-1, 1, 1) for t in (mean, rstd, weight, bias))
    mean, rstd, weight, bias = channels
    activation = torch.relu(((x.float() - mean) * rstd * weight + bias).to(x.dtype))
    pooled, at = F.max_pool2d(activation, window, stride, padding, return_indices=True)
    first = _first(pooled, stride, padding)
    down, along = at // x.shape[3] - first[0], at % x.shape[3] - first[1]
    offsets = (down * window[1] + along).to(torch.int8)
    return rows_of(pooled).contiguous(), rows_of(offsets).contiguous()


@fake(norm_relu_pool)
def _(call: Arguments) -> object:
    height, width = sides(call.x.shape[2:], call.window, call.stride, call.padding)
    size = call.x.shape[0] * height * width, call.x.shape[1]
    return call.x.new_empty(size), call.x.new_empty(size, dtype=torch.int8)


@op("max_pool_backward")
def max_pool_backward(
    grad: Tensor,
    offsets: Tensor,
    image: list[int],
    window: list[int],
    stride: list[int],
    padding: list[int],
) -> Tensor:
    """Return the gradient of the input of `max_pool2d`, as rows [B * H * W, C].

    Summed in fp32 and rounded once, as in Inductor. This is the reference.

    Args:
        grad: gradient of the result, [B, C, H', W'] in any floating dtype, which the rows get.
        offsets: [B, C, H', W'] in int8.
        image: size of the input, [H, W].
        window: size of the pooling kernel, [h, w].
        stride: of each dimension.
        padding: of each dimension.
    """
    taps, first = offsets.long(), _first(grad, stride, padding)
    at = (first[0] + taps // window[1]) * image[1] + first[1] + taps % window[1]
    sums = grad.new_zeros((*grad.shape[:2], image[0] * image[1]), dtype=torch.float32)
    sums.scatter_add_(2, at.flatten(2), grad.flatten(2).float())
    return rows_of(sums.to(grad.dtype).view(*grad.shape[:2], *image)).contiguous()


@fake(max_pool_backward)
def _(call: Arguments) -> object:
    return call.grad.new_empty(
        (call.grad.shape[0] * call.image[0] * call.image[1], call.grad.shape[1])
    )


def _first(pooled: Tensor, stride: list[int], padding: list[int]) -> list[Tensor]:
    """Return the row and the column of the input at which each pooling window begins."""
    down, along = (
        torch.arange(size, device=pooled.device) * step - pad
        for size, step, pad in zip(pooled.shape[2:], stride, padding, strict=True)
    )
    return [down[:, None], along]
