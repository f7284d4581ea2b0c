"""`ipex::few_rows`: a product of few rows with a weight, in parts that are yet to be added up."""

import torch
from torch import Tensor

from ipex_inductor.ops.defining import op


@op("few_rows")
def few_rows(x: Tensor, weight: Tensor, terms: int, tile: list[int]) -> Tensor:
    """`x @ weight.T` of `terms` terms at a time, one part below the other, not rounded.

    x [M, K], weight [N, K] -> [ceil(K / terms) * M, N] in fp32, of fp64 in fp64. `tile` are the
    fields of `templates.few_rows.Tile`, by which Inductor's kernel goes. This is the reference.
    """
    wide = unrounded(x)
    starts = range(0, x.shape[1], terms)
    factors = ((t[:, k : k + terms].to(wide) for t in (x, weight)) for k in starts)
    return torch.cat([part @ other.t() for part, other in factors])


@few_rows.register_fake
def _(x: Tensor, weight: Tensor, terms: int, tile: list[int]) -> Tensor:
    parts = -(-x.shape[1] // terms)
    return x.new_empty((parts * x.shape[0], weight.shape[0]), dtype=unrounded(x))


def unrounded(x: Tensor) -> torch.dtype:
    """The dtype of sums that are not rounded."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32
