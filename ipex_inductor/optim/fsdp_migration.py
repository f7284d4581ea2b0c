"""Migration of optimizers to the shards that `fully_shard` (FSDP2) makes of their parameters.

torch asks users to create a new optimizer for the shards. A new one would not know the full
precision, so the existing optimizer is moved to the shards with all state of each parameter.
"""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ipex_inductor.errors import ArgumentError
from ipex_inductor.optim.shards import cut_part, wrap_part
from ipex_inductor.optim.weights import SHARDED, TABLE, Place, find_shards


def follow(optimizer: Optimizer) -> None:
    """Find sharded parameters and have a wrapped `optimizer` step their shards.

    Raises `ArgumentError` if a state tensor does not have the shape of its parameter.
    """
    find_shards()
    if Place.sharded:
        _follow(optimizer)


@torch.no_grad()
def _follow(optimizer: Optimizer) -> None:
    """Replace parameters of a wrapped optimizer by their shards, with state and gradients."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    shards = {p: vars(p)[SHARDED] for p in params if SHARDED in vars(p)}
    attributes, state = vars(optimizer), optimizer.state
    if TABLE not in attributes or not shards:
        return
    shard_states = {p: _cut_state(state[p], p, shard) for p, shard in shards.items() if p in state}
    for group in optimizer.param_groups:
        group["params"] = [shards.get(p, p) for p in group["params"]]
    attributes[TABLE] = {weight.param: weight for weight in attributes[TABLE].values()}
    for param, shard in shards.items():
        if param in shard_states:
            del state[param]
            state[shard] = shard_states[param]
        if param.grad is not None and shard.grad is None:
            shard.grad = wrap_part(cut_part(param.grad, shard), shard)


def _cut_state(state: dict[str, Any], param: Tensor, shard: Tensor) -> dict[str, Any]:
    """Return the state of `param` cut as `shard` is; scalars stay.

    Raises `ArgumentError` for a tensor of another shape than `param`.
    """

    def cut_one(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() == 0:
            return value  # the step counter, for example
        if value.shape != param.shape:
            raise ArgumentError(
                "an optimizer that keeps numbers and tensors in the shapes of its parameters",
                f"{name!r} of shape {tuple(value.shape)} for one of shape {tuple(param.shape)}",
                "Call fully_shard before the first step.",
            )
        return wrap_part(cut_part(value, shard), shard)

    return {name: cut_one(name, value) for name, value in state.items()}
