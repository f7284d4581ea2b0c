"""`ipex::relu_norm_gradient`: gradient of ReLU after batch norm, without a stored mask."""

import torch
from torch import Tensor

from ipex_inductor.ops.common.defining import op


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
    """Return `gradient`, with 0 where relu((x - mean) * scale * weight + bias) is 0.

    A NaN passes its gradient, as in `aten.threshold_backward`. This is the reference.

    Args:
        gradient: [N, C, ...].
        x: [N, C, ...], of the dtype of `gradient`.
        mean: broadcasts to x, in fp32 (fp64 for fp64), as all below.
        scale: reciprocal standard deviation.
        weight: of the batch norm.
        bias: of the batch norm.
        reader: index of the reading node; calls that differ in it are not merged by a graph, so
            each is computed where it is read.
    """
    normed = (x - mean) * scale * weight + bias
    return torch.where(normed <= 0, torch.zeros_like(gradient), gradient)


@op("kept")
def save_copy(x: Tensor) -> Tensor:
    """Return a copy that a forward saves for its backward, which never recomputes it from `x`."""
    return x.clone()


relu_norm_gradient.register_fake(lambda gradient, *_: torch.empty_like(gradient))
save_copy.register_fake(torch.clone)
