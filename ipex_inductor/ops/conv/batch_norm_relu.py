"""`ipex::conv_preactivated`: batch norm, ReLU and a 1 x 1 convolution.

Layers of a DenseNet begin so (Huang et al. 2016, arXiv:1608.06993), reading the concatenated
features of all layers before them; and the full pre-activation blocks of He et al. 2016
(arXiv:1603.05027).
"""

import torch
from torch import Tensor

from ipex_inductor.ops.common.defining import op
from ipex_inductor.ops.conv import conv
from ipex_inductor.ops.conv.geometry import rows_of
from ipex_inductor.ops.gemm.skinny import sum_dtype

WINDOW = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)


def activate(
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    epsilon: float,
    more: list[Tensor],
) -> Tensor:
    """Return `relu(batch_norm(cat([x, *more], 1)))` in inference, rounded to the dtype of x.

    Args:
        x: [B, D, H, W].
        gamma: [C].
        beta: [C].
        mean: [C].
        variance: [C].
        epsilon: added to the variance.
        more: further activations, C channels in all.
    """
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
    """Return `unary(conv2d(relu(batch_norm(cat([x, *more], 1))), weight, bias), *scalars)`.

    Args:
        x: [B, D, H, W].
        weight: [O, C, 1, 1].
        bias: [O].
        gamma: [C].
        beta: [C].
        mean: [C].
        variance: [C].
        epsilon: added to the variance.
        more: activations of the same batch and size, C channels in all.
        unary: name in `ops/common/epilogue.py`.
        scalars: arguments of the unary.

    Returns:
        [B, O, H, W].
    """
    image = activate(x, gamma, beta, mean, variance, epsilon, more)
    return conv.reference(image, weight, bias, None, *WINDOW, "none", unary, scalars)


def affine(
    gamma: Tensor | None, beta: Tensor | None, mean: Tensor, variance: Tensor, epsilon: float
) -> Tensor:
    """Return the scale and the shift that a batch norm applies: [2, C] in fp32 (fp64 for fp64).

    Computed in fp64 and rounded once.

    Args:
        gamma: [C].
        beta: [C].
        mean: [C].
        variance: [C].
        epsilon: added to the variance.
    """
    scale = (variance.double() + epsilon).rsqrt()
    scale = scale if gamma is None else scale * gamma.double()
    shift = -mean.double() * scale
    shift = shift if beta is None else shift + beta.double()
    return torch.stack([scale, shift]).to(sum_dtype(mean))


def rows(
    x: Tensor,
    affine: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    more: list[Tensor],
    tile: list[int],
) -> Tensor:
    """Return the convolution with its bias as rows, one per pixel, not rounded: [B * H * W, O].

    In fp32 (fp64 for fp64). This is the reference of `templates/triton/batch_norm_relu.py`.

    Args:
        x: activation in channels-last.
        affine: result of `affine`, [2, C].
        weight: matrix [O, C].
        bias: [O].
        more: further activations in channels-last.
        tile: parameters of the template.
    """
    wide = sum_dtype(x)
    scale, shift = affine.to(wide)
    inputs = rows_of(torch.cat([x, *more], 1)).to(wide)
    product = torch.relu(inputs * scale + shift).to(x.dtype).to(wide) @ weight.to(wide).t()
    return product if bias is None else product + bias.to(wide)


conv_preactivated, preactivated_rows = (
    op("conv_preactivated")(reference),
    op("preactivated_rows")(rows),
)
conv_preactivated.register_fake(reference)
preactivated_rows.register_fake(rows)
