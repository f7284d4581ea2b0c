"""Replicas of a model: `DistributedDataParallel` broadcasts parameters, which hold only part of it.

Low-precision parameters have fp32 values. The bits that parameters cannot hold are broadcast from
the first process to all other processes when DDP takes the model.
"""

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from ipex_inductor.optim.weights import Trained, weights_of


@functools.cache
def watch() -> None:
    """Synchronize master weights of every model that DDP takes from now on in this process."""
    register_module_module_registration_hook(_broadcast_rests)


def _broadcast_rests(parent: Any, name: str, module: Any) -> None:
    """Broadcast the rests of master weights when `module` is registered in DDP."""
    if isinstance(parent, DistributedDataParallel) and name == "module":
        weights = weights_of(module).values()
        rests = [weight.rest for weight in weights if isinstance(weight, Trained)]
        if rests:
            _broadcast(rests, parent.process_group)


@torch.no_grad()
def _broadcast(tensors: list[Tensor], group: Any) -> None:
    """Copy the values of the first process of `group` to all of it, byte by byte."""
    # As DDP does before any broadcast: with unequal shapes, a broadcast would hang.
    torch.distributed.utils._verify_param_shape_across_processes(group, tensors)
    for tensor in tensors:
        copy = tensor.clone(memory_format=torch.contiguous_format)  # no view of `tensor`
        payload = copy.flatten().view(torch.uint8)
        torch.distributed.broadcast(payload, group=group, group_src=0)
        tensor.copy_(payload.view(tensor.dtype).view(tensor.shape))
