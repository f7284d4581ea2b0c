"""Decide which graphs may be measured while they compile for their first call."""

from typing import TYPE_CHECKING

import torch
from torch._subclasses import FakeTensor

from ipex_inductor.compiler.request import Request

if TYPE_CHECKING:
    from ipex_inductor.lowerings.tune.first_call import FirstCall


def start_first_call(request: Request) -> "FirstCall | None":
    """Return what measures kernels of the graph from now on; None if nothing may be measured."""
    if not may_measure(request):
        return None
    from ipex_inductor.lowerings.tune.first_call import FirstCall

    return FirstCall()


def may_measure(request: Request) -> bool:
    """Return whether the kernels of a graph may be measured while it compiles.

    It has to be inference on one NVIDIA GPU that this process may use now, and the process must
    not have to be deterministic.
    """
    is_deterministic = torch.are_deterministic_algorithms_enabled() or request.option(
        "deterministic"
    )
    if not request.allows_first_call or is_deterministic:
        return False
    on_one_gpu = [device.type for device in request.devices if device.type != "cpu"] == ["cuda"]
    return on_one_gpu and _has_gpu_now(request)


def _has_gpu_now(request: Request) -> bool:
    """Return whether inputs are real, on a GPU that executes what is called."""
    is_described = any(isinstance(value, FakeTensor) for value in request.example_inputs)
    return (
        not is_described
        and torch.cuda.is_available()
        and not torch.cuda.is_current_stream_capturing()
    )
