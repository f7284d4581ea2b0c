"""`ipex::conv_scaled`: a convolution of one pixel of an image whose channels are scaled.

As squeeze-and-excitation ends (Hu et al. 2017, arXiv:1709.01507): each channel of each image times
a number that was computed of that image.
"""

from torch import Tensor

from ipex_inductor.ops import conv
from ipex_inductor.ops.defining import op
from ipex_inductor.ops.few_rows import unrounded
from ipex_inductor.ops.stem import rows_of

WINDOW = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)


def reference(
    x: Tensor,
    scale: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    other: Tensor | None,
    binary: str,
    unary: str,
    scalars: list[float],
) -> Tensor:
    """`ipex::conv` on `x * scale`, with its epilogue.

    x [B, C, H, W], scale [B, C, 1, 1], weight [O, C, 1, 1], bias [O], other [B, O, H, W] -> as
    other. The product is rounded to the dtype of x, as torch does.
    """
    return conv.reference(x * scale, weight, bias, other, *WINDOW, binary, unary, scalars)


def rows(x: Tensor, scale: Tensor, weight: Tensor, bias: Tensor | None, tile: list[int]) -> Tensor:
    """The convolution and its bias as rows, a pixel each, not rounded: [B * H * W, O].

    `scale` [B, C] and `weight` [O, C] are matrices, x is an image in channels-last; in fp32, of
    fp64 in fp64. `tile` is for `templates/scaled.py`. This is the reference.
    """
    wide = unrounded(x)
    made = rows_of(x * scale[:, :, None, None]).to(wide) @ weight.to(wide).t()
    return made if bias is None else made + bias.to(wide)


conv_scaled, scaled_rows = op("conv_scaled")(reference), op("scaled_rows")(rows)
conv_scaled.register_fake(reference)
scaled_rows.register_fake(rows)
