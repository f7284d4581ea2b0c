"""Replicas of a model: `DistributedDataParallel` broadcasts parameters, which are not all of it.

Low-precision parameters have fp32 values; what of those the parameters cannot hold goes the same
way, from the first process to the others, when DDP takes the model.
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
    """From now on in this process, agree on the values of models that DDP takes."""
    register_module_module_registration_hook(_registered)


def _registered(parent: Any, name: str, module: Any) -> None:
    if isinstance(parent, DistributedDataParallel) and name == "module":
        weights = weights_of(module).values()
        rests = [weight.rest for weight in weights if isinstance(weight, Trained)]
        if rests:
            _broadcast(rests, parent.process_group)


@torch.no_grad()
def _broadcast(tensors: list[Tensor], group: Any) -> None:
    """Give all processes of `group` the values of its first, whatever dtypes its backend knows."""
    # As DDP does before it sends anything: of other shapes it would not end.
    torch.distributed.utils._verify_param_shape_across_processes(group, tensors)
    for tensor in tensors:
        copied = tensor.clone(memory_format=torch.contiguous_format)  # no view of `tensor`
        sent = copied.flatten().view(torch.uint8)
        torch.distributed.broadcast(sent, group=group, group_src=0)
        tensor.copy_(sent.view(tensor.dtype).view(tensor.shape))
