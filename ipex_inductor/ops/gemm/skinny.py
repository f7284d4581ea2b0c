"""`ipex::few_rows`: a skinny GEMM, split along K into parts that are summed later."""

import torch
from torch import Tensor

from ipex_inductor.ops.common.defining import op


@op("few_rows")
def few_rows(x: Tensor, weight: Tensor, terms: int, tile: list[int]) -> Tensor:
    """Return `x @ weight.T` over `terms` of K at a time, parts stacked along rows, not rounded.

    x [M, K], weight [N, K] -> [ceil(K / terms) * M, N] in fp32 (fp64 for fp64). `tile` has the
    fields of `templates.few_rows.Tile`, which Inductor's kernel uses. This is the reference.
    """
    wide = sum_dtype(x)
    starts = range(0, x.shape[1], terms)
    factors = ((t[:, k : k + terms].to(wide) for t in (x, weight)) for k in starts)
    return torch.cat([part @ weight_part.t() for part, weight_part in factors])


@few_rows.register_fake
def _(x: Tensor, weight: Tensor, terms: int, tile: list[int]) -> Tensor:
    parts = -(-x.shape[1] // terms)
    return x.new_empty((parts * x.shape[0], weight.shape[0]), dtype=sum_dtype(x))


def sum_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of sums that are not rounded: fp64 for fp64, else fp32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32
