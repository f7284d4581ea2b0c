"""`ipex::column_moments` and `ipex::moments`: variances and means of columns, in two steps.

The first has sums of columns and of their squares, one part per program of a kernel.

With a shift near the mean of a column, sums of squares lose little to cancellation, while Welford's
method divides at every row. If the shift is the mean of k of the N elements, (shift - mean)^2 <=
N / k * variance by Cauchy and Schwarz for any data. The worst relative error of the variance is
N / k roundings of fp32, for a column whose k samples are equal and differ from all other elements.
For typical samples it is a few roundings.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ipex_inductor.ops.common.defining import op

SAMPLES = 16  # rows whose mean is the shift


def sample_distance(rows: int) -> int:
    """Return the distance between sampled rows; samples beyond the last row repeat it.

    It is odd, so that samples are not one pixel of several images, such as a padded corner.
    """
    return rows // SAMPLES | 1


@op("column_moments")
def column_moments(x: Tensor, parts: int, tile: list[int]) -> Tensor:
    """Return sums, sums of squares and the shift of the columns of x [N, C]; the reference.

    A part has every `parts`-th block of `tile[0]` rows. `tile` has the parameters of the template
    (`templates/triton/moments.py`). The result is [C, 2 * parts + 1] in fp32.
    """
    values = x.float()
    samples = torch.arange(SAMPLES, device=x.device) * sample_distance(len(x))
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
    """Return variance and mean [C] from the result of `column_moments`; the reference.

    Args:
        partial: result of `column_moments`.
        rows: number of rows that it summed.
    """
    parts = partial.shape[1] // 2
    offset = partial[:, :parts].sum(1) / rows
    square = partial[:, parts:-1].sum(1) / rows
    return (square - offset * offset).clamp(min=0), partial[:, -1] + offset


@moments.register_fake
def _(partial: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    return partial.new_empty(len(partial)), partial.new_empty(len(partial))
