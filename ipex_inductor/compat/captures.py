"""CUDA graphs: what torch's public names do not say."""

import contextlib
from typing import Any

import torch


def uncapturable(gm: Any) -> Any:
    """The first node of which Inductor knows that it cannot be captured, None for none."""
    from torch._inductor.utils import get_first_incompatible_cudagraph_node

    return get_first_incompatible_cudagraph_node(gm)


def is_traced() -> bool:
    """Whether a mode sees torch's calls in this thread; the kernels of a graph it would not."""
    return torch._C._len_torch_dispatch_stack() > 0


def cudnn_settings() -> tuple[Any, ...]:
    """What cuDNN reads at each call, and Dynamo does not look at before it."""
    c: Any = torch._C
    precision = c._get_fp32_precision_getter("cuda", "conv")
    flags = c._get_cudnn_enabled(), c._get_cudnn_benchmark(), c._get_cudnn_deterministic()
    return precision, *flags


def drop_cublas_memory() -> None:
    """Have cuBLAS ask anew for the memory that it works in, as Inductor does around its captures.

    What it asks for in a capture is the graph's then, and is not kept for others.
    """
    torch._C._cuda_clearCublasWorkspaces()


def end_capture(device: int, pool: Any) -> None:
    """After a capture that could not be ended: its pool takes no more memory, and goes.

    Torch does neither then. If the capture could be ended, this does nothing.
    """
    with contextlib.suppress(Exception):
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)
