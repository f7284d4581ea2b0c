"""CUDA graphs: state that torch's public names do not expose."""

import contextlib
from typing import Any

import torch


def uncapturable(gm: Any) -> Any:
    """Return the first node that Inductor knows cannot be captured, None if all can be."""
    from torch._inductor.utils import get_first_incompatible_cudagraph_node

    return get_first_incompatible_cudagraph_node(gm)


def is_traced() -> bool:
    """Return whether a dispatch mode sees torch's calls in this thread.

    Such a mode would not see the kernels of a graph.
    """
    return torch._C._len_torch_dispatch_stack() > 0


def cudnn_settings() -> tuple[Any, ...]:
    """Return the settings that cuDNN reads at each call, which Dynamo does not guard on."""
    c: Any = torch._C
    precision = c._get_fp32_precision_getter("cuda", "conv")
    flags = c._get_cudnn_enabled(), c._get_cudnn_benchmark(), c._get_cudnn_deterministic()
    return precision, *flags


def drop_cublas_memory() -> None:
    """Release cuBLAS's workspaces, as Inductor does around its captures; it allocates new ones.

    A workspace allocated in a capture belongs to the graph, and is not kept for other calls.
    """
    torch._C._cuda_clearCublasWorkspaces()


def end_capture(device: int, pool: Any) -> None:
    """Stop allocations to the pool of a capture that could not be ended, and release the pool.

    Torch does neither then. If the capture could be ended, this does nothing.
    """
    with contextlib.suppress(Exception):
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)
