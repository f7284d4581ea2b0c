"""Parameters that `fully_shard` (FSDP2) has sharded: DTensors, of which each process holds a part.

Before torch.distributed.tensor is imported there is none, so nothing here imports it.
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn


def is_sharded(tensor: Any) -> bool:
    """Whether `tensor` is a DTensor."""
    home = sys.modules.get("torch.distributed.tensor")
    return home is not None and isinstance(tensor, home.DTensor)


def is_kind_of_shards(kind: type) -> bool:
    """Whether that is DTensor itself."""
    home = sys.modules.get("torch.distributed.tensor")
    return home is not None and kind is home.DTensor


def same_mesh(one: Any, other: Any) -> bool:
    """Whether two DTensors are cut among the same processes."""
    return bool(one.device_mesh == other.device_mesh)


def same_places(one: Any, other: Any) -> bool:
    """Whether each process holds of both DTensors the same part."""
    return is_sharded(other) and same_mesh(one, other) and one.placements == other.placements


def local(tensor: Tensor) -> Tensor:
    """The part of `tensor` that this process holds, as a view without gradients."""
    if not is_sharded(tensor):
        return tensor.detach()
    given: Any = tensor
    part: Tensor = given._local_tensor
    # What `to_local` gives of a detached one counts versions of its own, and takes 20 us.
    return part.detach() if type(part) is Tensor else given.detach().to_local()


def whole(part: Tensor, like: Tensor) -> Tensor:
    """The tensor of which this process holds `part`, sharded as `like` is."""
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


def cut(full: Tensor, like: Any) -> Tensor:
    """What this process holds of `full` once that is sharded as `like` is: in memory of its own.

    Each process cuts what it has. So does `fully_shard`, which sends nothing either.
    """
    *_, placement = like.placements
    if placement.is_shard():
        rank = like.device_mesh.get_local_rank(like.device_mesh.ndim - 1)
        parts = full.chunk(like.device_mesh.size(-1), placement.dim)
        # There may be fewer parts than processes.
        full = parts[rank] if rank < len(parts) else full.narrow(placement.dim, 0, 0)
    return full.clone(memory_format=torch.contiguous_format)


def replaces(value: Any, param: Tensor) -> bool:
    """Whether `fully_shard` may have made `value` of `param`: cut on the last dimension of a mesh.

    Where it is cut otherwise as well, by tensor parallelism, values came from another process.
    """
    return (
        is_sharded(value)
        and not is_sharded(param)
        and (value.shape, value.dtype) == (param.shape, param.dtype)
        and all(placement.is_replicate() for placement in value.placements[:-1])
    )


def is_managed(module: nn.Module) -> bool:
    """Whether FSDP2 has sharded parameters of `module`: it left a hook there."""
    return any(map(_is_fsdps, module._load_state_dict_post_hooks.values()))


def put_back(module: nn.Module) -> None:
    """Have FSDP2 put shards in the place of what it had gathered, as it does for state dicts."""
    for hook in filter(_is_fsdps, module._state_dict_pre_hooks.values()):
        hook(module, "", False)


def _is_fsdps(hook: Any) -> bool:
    return getattr(hook, "__module__", "").startswith("torch.distributed.fsdp.")
