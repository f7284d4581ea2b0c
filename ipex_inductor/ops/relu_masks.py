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

    `gradient` and x [N, C, ...] of one dtype, the others in fp32 (of fp64 in fp64) and in shapes
    that broadcast to theirs. A NaN lets through, as in `aten.threshold_backward`. `reader` is a
    number: a graph keeps calls apart that differ in it, so that each is computed where it is read.
    The reference.
    """
    normed = (x - mean) * scale * weight + bias
    return torch.where(normed <= 0, torch.zeros_like(gradient), gradient)


@op("kept")
def kept(x: Tensor) -> Tensor:
    """A copy that a forward keeps for its backward, which never computes it again of `x`."""
    return x.clone()


relu_norm_gradient.register_fake(lambda gradient, *_: torch.empty_like(gradient))
kept.register_fake(torch.clone)
