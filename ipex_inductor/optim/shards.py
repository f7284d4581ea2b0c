"""Parameters that `fully_shard` (FSDP2) has sharded: DTensors with a part in each process.

No DTensor exists before torch.distributed.tensor is imported, so nothing here imports it.
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn


def is_sharded(tensor: Any) -> bool:
    """Return whether `tensor` is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_kind_of_shards(kind: type) -> bool:
    """Return whether `kind` is the class DTensor itself."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and kind is module.DTensor


def same_mesh(first: Any, second: Any) -> bool:
    """Return whether two DTensors are distributed over one mesh."""
    return bool(first.device_mesh == second.device_mesh)


def same_places(first: Any, second: Any) -> bool:
    """Return whether both tensors are DTensors that are cut in one way over one mesh."""
    return is_sharded(second) and same_mesh(first, second) and first.placements == second.placements


def local(tensor: Tensor) -> Tensor:
    """Return the part of `tensor` that this process holds, as a view without gradients."""
    if not is_sharded(tensor):
        return tensor.detach()
    dtensor: Any = tensor
    part: Tensor = dtensor._local_tensor
    # The result of `to_local` on a detached DTensor has its own version counter, and takes 20 us.
    return part.detach() if type(part) is Tensor else dtensor.detach().to_local()


def wrap_part(part: Tensor, like: Tensor) -> Tensor:
    """Return the tensor of which this process holds `part`, sharded as `like` is."""
    if not is_sharded(like):
        return part
    spec: Any = like
    return type(spec).from_local(  # type: ignore[no-any-return]
        part,
        spec.device_mesh,
        spec.placements,
        run_check=False,
        shape=spec.shape,
        stride=spec.stride(),
    )


def cut_part(full: Tensor, like: Any) -> Tensor:
    """Return this process's part of `full` once that is sharded as `like`, in new memory.

    Each process cuts its own copy, as `fully_shard` does, so nothing is communicated.
    """
    *_, placement = like.placements
    if placement.is_shard():
        rank = like.device_mesh.get_local_rank(like.device_mesh.ndim - 1)
        parts = full.chunk(like.device_mesh.size(-1), placement.dim)
        # There may be fewer parts than processes.
        full = parts[rank] if rank < len(parts) else full.narrow(placement.dim, 0, 0)
    return full.clone(memory_format=torch.contiguous_format)


def replaces(value: Any, param: Tensor) -> bool:
    """Return whether `fully_shard` may have made `value` of `param`.

    If so, `value` is cut on the last mesh dimension alone. If tensor parallelism cuts another
    dimension as well, values came from another process.
    """
    return (
        is_sharded(value)
        and not is_sharded(param)
        and (value.shape, value.dtype) == (param.shape, param.dtype)
        and all(placement.is_replicate() for placement in value.placements[:-1])
    )


def is_managed(module: nn.Module) -> bool:
    """Return whether FSDP2 has sharded parameters of `module`, as its hook there shows."""
    return any(map(_is_fsdps, module._load_state_dict_post_hooks.values()))


def put_back(module: nn.Module) -> None:
    """Have FSDP2 replace gathered parameters by shards, as it does for state dicts."""
    for hook in filter(_is_fsdps, module._state_dict_pre_hooks.values()):
        hook(module, "", False)


def _is_fsdps(hook: Any) -> bool:
    """Return whether `hook` belongs to FSDP."""
    return getattr(hook, "__module__", "").startswith("torch.distributed.fsdp.")
