"""`ipex::conv_preactivated`: a convolution of one pixel behind a batch norm and a relu.

So layers of a DenseNet begin (Huang et al. 2016, arXiv:1608.06993), which read the features of all
layers before them, side by side; and blocks that He et al. 2016 (arXiv:1603.05027) call full
pre-activation.
"""

import torch
from torch import Tensor

from ipex_inductor.ops import conv
from ipex_inductor.ops.defining import op
from ipex_inductor.ops.few_rows import unrounded
from ipex_inductor.ops.stem import rows_of

WINDOW = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)


def activated(
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    epsilon: float,
    more: list[Tensor],
) -> Tensor:
    """`relu(batch_norm(cat([x, *more], 1)))` in inference, rounded to the dtype of x."""
    whole = torch.cat([x, *more], 1) if more else x
    norm = torch.ops.aten._native_batch_norm_legit_no_training
    return torch.relu(norm(whole, gamma, beta, mean, variance, 0.0, epsilon)[0])


def reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gamma: Tensor | None,
    beta: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    epsilon: float,
    more: list[Tensor],
    unary: str,
    scalars: list[float],
) -> Tensor:
    """`unary(conv2d(relu(batch_norm(cat([x, *more], 1))), weight, bias), *scalars)`.

    x [B, D, H, W], `more` of as many images and pixels, C channels in all; weight [O, C, 1, 1],
    bias [O], gamma, beta, mean and variance [C] -> [B, O, H, W].
    """
    image = activated(x, gamma, beta, mean, variance, epsilon, more)
    return conv.reference(image, weight, bias, None, *WINDOW, "none", unary, scalars)


def affine(
    gamma: Tensor | None, beta: Tensor | None, mean: Tensor, variance: Tensor, epsilon: float
) -> Tensor:
    """What a batch norm multiplies channels by, and what it adds: [2, C] in fp32, of fp64 in fp64.

    Computed in fp64 and rounded once.
    """
    scale = (variance.double() + epsilon).rsqrt()
    scale = scale if gamma is None else scale * gamma.double()
    shift = -mean.double() * scale
    shift = shift if beta is None else shift + beta.double()
    return torch.stack([scale, shift]).to(unrounded(mean))


def rows(
    x: Tensor,
    affine: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    more: list[Tensor],
    tile: list[int],
) -> Tensor:
    """The convolution and its bias as rows, a pixel each, not rounded: [B * H * W, O].

    x and `more` are images in channels-last, `weight` [O, C] is a matrix, `affine` as above; in
    fp32, of fp64 in fp64. `tile` is for `templates/triton/batch_norm_relu.py`. This is the
    reference.
    """
    wide = unrounded(x)
    scale, shift = affine.to(wide)
    given = rows_of(torch.cat([x, *more], 1)).to(wide)
    made = torch.relu(given * scale + shift).to(x.dtype).to(wide) @ weight.to(wide).t()
    return made if bias is None else made + bias.to(wide)


conv_preactivated, preactivated_rows = (
    op("conv_preactivated")(reference),
    op("preactivated_rows")(rows),
)
conv_preactivated.register_fake(reference)
preactivated_rows.register_fake(rows)
