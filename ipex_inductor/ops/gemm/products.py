"""GEMMs with a weight, in one kernel with their epilogue: one op per template.

`ipex::streamed` is memory-bound; `ipex::persistent` and `ipex::pipelined` are compute-bound.
"""

from typing import Any

import torch
from torch import Tensor

from ipex_inductor.ops.common.defining import op
from ipex_inductor.ops.gemm.skinny import sum_dtype


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, tile: list[int]) -> Tensor:
    """Return `x @ weight.T + bias`, not rounded: x [M, K], weight [N, K], bias [N] -> [M, N].

    In fp32 (fp64 for fp64). `tile` has the fields of the template's `Tile`, which Inductor's kernel
    uses. This is the reference.
    """
    factors: Any = (t if t is None else t.to(sum_dtype(x)) for t in (x, weight, bias))
    result: Tensor = torch.nn.functional.linear(*factors)
    return result


def _empty(x: Tensor, weight: Tensor, bias: Tensor | None, tile: list[int]) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=sum_dtype(x))


for _name in ("persistent", "pipelined", "streamed"):
    op(_name)(_product).register_fake(_empty)
