"""`ipex::persistent`: a product that is bound by arithmetic, in one kernel with what follows."""

from typing import Any

import torch
from torch import Tensor

from ipex_inductor.ops.defining import op
from ipex_inductor.ops.few_rows import unrounded


@op("persistent")
def persistent(x: Tensor, weight: Tensor, bias: Tensor | None, tile: list[int]) -> Tensor:
    """`x @ weight.T + bias`, not rounded: x [M, K], weight [N, K], bias [N] -> [M, N] in fp32.

    Of fp64 in fp64. `tile` are the fields of `templates.persistent.Tile`, by which Inductor's
    kernel goes. This is the reference.
    """
    factors: Any = (t if t is None else t.to(unrounded(x)) for t in (x, weight, bias))
    result: Tensor = torch.nn.functional.linear(*factors)
    return result


@persistent.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, tile: list[int]) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=unrounded(x))
