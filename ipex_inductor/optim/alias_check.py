"""Whose tensors lie in one another's memory, so that no kernel may step one beside the other."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ipex_inductor.optim.shards import is_sharded, local


def overlapping(owned: Iterable[tuple[Any, Tensor]]) -> set[Any]:
    """The owners of tensors that lie in one another's memory."""
    found: set[Any] = set()
    reached, by = 0, None
    spans = sorted((*_span(tensor), n, owner) for n, (owner, tensor) in enumerate(owned))
    for begin, end, _, owner in spans:
        if begin < reached:
            found |= {by, owner}
        if end > reached:
            reached, by = end, owner
    return found


def _span(tensor: Tensor) -> tuple[int, int]:
    held = local(tensor) if is_sharded(tensor) else tensor
    plain = type(held) in (Tensor, nn.Parameter) and held.layout is torch.strided
    if not plain or not held.numel():
        return 0, 0
    reach = sum(n * stride - stride for n, stride in zip(held.shape, held.stride(), strict=True))
    return held.data_ptr(), held.data_ptr() + (reach + 1) * held.element_size()
