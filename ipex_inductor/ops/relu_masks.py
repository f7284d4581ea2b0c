"""`ipex::relu_norm_gradient`: what a ReLU behind a batch norm lets through, without its mask."""

import torch
from torch import Tensor

from ipex_inductor.ops.defining import op


@op("relu_norm_gradient")
def relu_norm_gradient(
    gradient: Tensor,
    x: Tensor,
    mean: Tensor,
    scale: Tensor,
    weight: Tensor,
    bias: Tensor,
    reader: int,
) -> Tensor:
    """`gradient`, and 0 where relu((x - mean) * scale * weight + bias) is 0.

    `gradient` and x [N, C, ...] of one dtype, the others in shapes that broadcast to theirs;
    computed in fp32. A NaN lets through, as in `aten.threshold_backward`. `reader` is a number: a
    graph keeps calls apart that differ in it, so that each is computed where it is read. The
    reference.
    """
    normed = (x.float() - mean) * scale * weight + bias
    return torch.where(normed <= 0, torch.zeros_like(gradient), gradient)


@relu_norm_gradient.register_fake
def _(
    gradient: Tensor,
    x: Tensor,
    mean: Tensor,
    scale: Tensor,
    weight: Tensor,
    bias: Tensor,
    reader: int,
) -> Tensor:
    return torch.empty_like(gradient)
