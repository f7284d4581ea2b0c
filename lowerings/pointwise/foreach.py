"""Lowering of `ipex::foreach_convert` to a loop for each tensor, all in one kernel."""

from typing import Any

import torch
from torch._inductor.codegen.common import BackendFeature
from torch._inductor.lowering import register_lowering, to_dtype
from torch._inductor.virtualized import V


def _lower(tensors: list[Any], dtype: torch.dtype) -> list[Any]:
    results = [to_dtype(x, dtype, copy=True) for x in tensors]
    for result in results:
        result.realize()
    if V.graph.has_feature(results[0], BackendFeature.FOREACH):
        V.graph.register_operation_list([result.get_operation_name() for result in results])
    return results


def register() -> None:
    """Add the lowering to Inductor's registry."""
    register_lowering(torch.ops.ipex.foreach_convert.default, type_promotion_kind=None)(_lower)
