"""`ipex::column_moments` and `ipex::moments`: variances and means of columns, in two steps.

The first has sums of columns and of their squares, a part by each program of a kernel.

Shifted by a number near the mean of a column, sums of squares lose little to cancellation where
Welford's way divides at every row. With a shift that is the mean of k of its N numbers,
(shift - mean)^2 <= N / k * variance by Cauchy and Schwarz, whatever the numbers are: the worst
relative error of the variance is N / k roundings of fp32, which takes a column in which the k are
alike and all others differ; where the k are as good as any others it is a few.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ipex_inductor.ops.defining import op

SAMPLES = 16  # rows whose mean is the shift


def sampled(rows: int) -> int:
    """The distance between sampled rows; beyond the last it is that again.

    Odd, so that they are not the same pixel of several images, as a padded corner.
    """
    return rows // SAMPLES | 1


@op("column_moments")
def column_moments(x: Tensor, parts: int, tile: list[int]) -> Tensor:
    """Of rows x [N, C] in fp32 [C, 2 * parts + 1]: sums, sums of squares, what both are shifted by.

    A part has every so many-th block of as many rows as `tile` begins with. `tile` is for the
    template (`templates/triton/moments.py`). This is the reference.
    """
    values = x.float()
    samples = torch.arange(SAMPLES, device=x.device) * sampled(len(x))
    shift = (values[samples.clamp(max=len(x) - 1)] / SAMPLES).sum(0)
    rows = F.pad(values - shift, (0, 0, 0, -len(x) % (parts * tile[0])))
    blocks = rows.view(-1, parts, tile[0], x.shape[1])
    sums, squares = blocks.sum((0, 2)), blocks.square().sum((0, 2))
    return torch.cat([sums, squares, shift[None]]).t().contiguous()


@column_moments.register_fake
def _(x: Tensor, parts: int, tile: list[int]) -> Tensor:
    return x.new_empty((x.shape[1], 2 * parts + 1), dtype=torch.float32)


@op("moments")
def moments(partial: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Variance and mean [C] of what `column_moments` made of so many rows. The reference."""
    parts = partial.shape[1] // 2
    offset = partial[:, :parts].sum(1) / rows
    square = partial[:, parts:-1].sum(1) / rows
    return (square - offset * offset).clamp(min=0), partial[:, -1] + offset


@moments.register_fake
def _(partial: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    return partial.new_empty(len(partial)), partial.new_empty(len(partial))
