"""Products of rows with a weight, in one kernel with what follows: an op for each template.

`ipex::streamed` is bound by memory, `ipex::persistent` and `ipex::pipelined` by arithmetic.
"""

from typing import Any

import torch
from torch import Tensor

from ipex_inductor.ops.defining import op
from ipex_inductor.ops.few_rows import unrounded


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, tile: list[int]) -> Tensor:
    """`x @ weight.T + bias`, not rounded: x [M, K], weight [N, K], bias [N] -> [M, N] in fp32.

    Of fp64 in fp64. `tile` are the fields of the template's `Tile`, by which Inductor's kernel
    goes. This is the reference.
    """
    factors: Any = (t if t is None else t.to(unrounded(x)) for t in (x, weight, bias))
    result: Tensor = torch.nn.functional.linear(*factors)
    return result


def _empty(x: Tensor, weight: Tensor, bias: Tensor | None, tile: list[int]) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=unrounded(x))


for _name in ("persistent", "pipelined", "streamed"):
    op(_name)(_product).register_fake(_empty)
