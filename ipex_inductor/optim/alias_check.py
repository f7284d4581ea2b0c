"""Detection of tensors that share memory, which kernels must not step in parallel."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ipex_inductor.optim.shards import is_sharded, local


def find_overlapping(owned: Iterable[tuple[Any, Tensor]]) -> set[Any]:
    """Return the owners of tensors whose memory overlaps with that of another tensor."""
    sharing: set[Any] = set()
    reached, reaching_owner = 0, None
    spans = sorted((*_span(tensor), n, owner) for n, (owner, tensor) in enumerate(owned))
    for begin, end, _, owner in spans:
        if begin < reached:
            sharing |= {reaching_owner, owner}
        if end > reached:
            reached, reaching_owner = end, owner
    return sharing


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the first and the end address of a tensor; (0, 0) if it has no plain memory."""
    memory = local(tensor) if is_sharded(tensor) else tensor
    plain = type(memory) in (Tensor, nn.Parameter) and memory.layout is torch.strided
    if not plain or not memory.numel():
        return 0, 0
    reach = sum(
        n * stride - stride for n, stride in zip(memory.shape, memory.stride(), strict=True)
    )
    return memory.data_ptr(), memory.data_ptr() + (reach + 1) * memory.element_size()
