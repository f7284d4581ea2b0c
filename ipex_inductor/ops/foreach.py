"""`ipex::foreach_convert`: many tensors in another dtype, by one kernel."""

import torch
from torch import Tensor

from ipex_inductor.ops.defining import op


@op("foreach_convert")
def foreach_convert(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Each of `tensors` in `dtype`, in its own layout, as `Tensor.to` has it. The reference."""
    return [x.to(dtype, copy=True) for x in tensors]


@foreach_convert.register_fake
def _(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [torch.empty_like(x, dtype=dtype) for x in tensors]
