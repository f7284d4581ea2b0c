"""Optimizers that step what `fully_shard` (FSDP2) has made of their parameters.

torch would have an optimizer made anew, of the shards. That one would know nothing of full
precision, so the one that does goes over to them, with all that it keeps of each parameter.
"""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ipex_inductor.errors import ArgumentError
from ipex_inductor.optim.shards import cut, whole
from ipex_inductor.optim.weights import SHARDED, TABLE, Place, find_shards


def follow(optimizer: Optimizer) -> None:
    """Find what was sharded; have `optimizer`, if it is a wrapped one, step the shards.

    Raises `ArgumentError` where it keeps something of one that cannot be cut alike.
    """
    find_shards()
    if Place.sharded:
        _follow(optimizer)


@torch.no_grad()
def _follow(optimizer: Optimizer) -> None:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    shards = {p: vars(p)[SHARDED] for p in params if SHARDED in vars(p)}
    own, state = vars(optimizer), optimizer.state
    if TABLE not in own or not shards:
        return
    kept = {p: _cut_state(state[p], p, shard) for p, shard in shards.items() if p in state}
    for group in optimizer.param_groups:
        group["params"] = [shards.get(p, p) for p in group["params"]]
    own[TABLE] = {weight.param: weight for weight in own[TABLE].values()}
    for param, shard in shards.items():
        if param in kept:
            del state[param]
            state[shard] = kept[param]
        if param.grad is not None and shard.grad is None:
            shard.grad = whole(cut(param.grad, shard), shard)


def _cut_state(state: dict[str, Any], param: Tensor, shard: Tensor) -> dict[str, Any]:
    def cut_one(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() == 0:
            return value  # steps taken, say
        if value.shape != param.shape:
            raise ArgumentError(
                "an optimizer that keeps numbers and tensors in the shapes of its parameters",
                f"{name!r} of shape {tuple(value.shape)} for one of shape {tuple(param.shape)}",
                "Call fully_shard before the first step.",
            )
        return whole(cut(value, shard), shard)

    return {name: cut_one(name, value) for name, value in state.items()}
