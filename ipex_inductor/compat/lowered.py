"""Checks of what Inductor's lowerings do with their arguments."""

import functools
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import torch


@functools.cache
def reads_samples_backwards() -> bool:
    """Return whether 3-d fractional pooling swaps the random samples of depth and width.

    Eager reads one random sample for each axis, depth first. Torch 2.13 and 2.14 have a lowering
    that reads them backwards; other versions may have no lowering, or a right one.
    """
    from torch._inductor import lowering

    op = torch.ops.aten.fractional_max_pool3d.default
    if op not in lowering.lowerings or op in lowering.fallbacks:
        return False
    read: list[int] = []

    def loader(index: list[Any]) -> None:
        read.append(index[-1])
        raise LookupError  # only the index of the sample is needed

    samples = SimpleNamespace(make_loader=lambda: loader, get_size=lambda: [1, 1, 3])
    sizes = {"in_sz": [9] * 3, "out_sz": [3] * 3, "kernel_sz": [2] * 3}
    offsets: Any = lowering._fractional_pooling_offsets
    load = offsets(samples=samples, **sizes, dim=0, ndims=3)
    with suppress(LookupError):
        load([0, 0], 0)
    return read == [2]
