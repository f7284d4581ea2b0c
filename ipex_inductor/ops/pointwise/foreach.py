"""`ipex::foreach_convert`: many tensors converted to another dtype by one kernel."""

import torch
from torch import Tensor

from ipex_inductor.ops.common.defining import op


@op("foreach_convert")
def foreach_convert(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return each of `tensors` in `dtype` with its layout, as `Tensor.to` does: the reference."""
    return [x.to(dtype, copy=True) for x in tensors]


@foreach_convert.register_fake
def _(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [torch.empty_like(x, dtype=dtype) for x in tensors]
